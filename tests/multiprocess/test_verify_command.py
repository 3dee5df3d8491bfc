"""`llmscale verify` from its command line to its exit code, with the processes it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_llmscale.cli import main
from lightning_llmscale.errors import VerificationError
from lightning_llmscale.verification import Settings, verify
from tests.multiprocess import verify_runs as runs

MODULE = runs.__name__

CONFIG = f"""\
seed_everything: 3
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 3
  strategy: lightning_llmscale.RingAllReduceStrategy
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {{monitor: nothing_that_is_logged}}
model:
  class_path: {MODULE}.TiedLM
  init_args: {{dropout: 0.5}}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run.yaml").write_text(CONFIG)


def test_equal_is_0_and_the_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--config", "run.yaml", "--steps", "3", "--json", "out.json"]) == 0
    shown = capsys.readouterr()
    assert "Equal within 1e-05: 3 steps under RingAllReduceStrategy on 2 processes" in shown.out
    assert "embedding.weight = head.weight" in shown.out
    assert shown.err.splitlines() == ["the run under the strategy", "the plain run", "comparing"]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"] is True
    assert report["ranks"] == 2
    assert report["largest"]["gradients"]["difference"] < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "run.yaml"]


@pytest.mark.long
def test_different_is_1_and_the_recordings_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--trainer.strategy={MODULE}.SummedGradients", "--steps=2", "--keep=kept"]
    assert main(["verify", "--config", "run.yaml", *options]) == 1
    shown = capsys.readouterr().out
    assert "Different under SummedGradients on 2 processes: the gradient of embedding.weight in step 1" in shown
    assert "summed where they should be averaged" in shown
    assert (tmp_path / "kept" / "strategy" / "rank1" / "end.pt").exists()


@pytest.mark.long
def test_randomness_of_the_module_is_told_from_a_wrong_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--config", "run.yaml", "--keep-dropout", "--steps=2"]) == 1
    assert "The module draws random numbers in training" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ranks_started_by_multiprocessing(start_method: str) -> None:
    option = f"--trainer.strategy.init_args.start_method={start_method}"
    strategy = "--trainer.strategy=lightning_llmscale.RingAllReduceStrategy"
    assert main(["verify", "--config", "run.yaml", strategy, option, "--steps=2"]) == 0


def test_a_wrong_option_is_2_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--config", "run.yaml", "--trainer.devicess=2"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("llmscale verify: error: option 'trainer.devicess' does not exist; did you mean")


def test_a_failing_rank_is_named_with_its_error() -> None:
    with pytest.raises(VerificationError, match=r"rank 1.*the second batch of rank 1"):
        verify(runs.build_failing_on_rank_1, settings=Settings(steps=3), timeout=60)


def test_a_run_that_does_not_end_is_ended() -> None:
    with pytest.raises(VerificationError, match="the run under the strategy did not end within 1 s"):
        verify(runs.build_failing_on_rank_1, timeout=1)


def test_progress_counts_the_steps(tmp_path: Path) -> None:
    lines: list[Any] = []
    with pytest.raises(VerificationError):
        verify(runs.build_failing_on_rank_1, timeout=1, progress=lines.append, folder=tmp_path / "kept")
    assert lines[0] == "the run under the strategy: starting"


def test_a_folder_of_recordings_is_used_again(tmp_path: Path) -> None:
    stale = tmp_path / "kept" / "strategy" / "rank7"
    for _ in range(2):
        with pytest.raises(VerificationError):
            verify(runs.build_failing_on_rank_1, timeout=0.5, folder=tmp_path / "kept")
        assert not stale.exists()
        stale.mkdir(parents=True)
