"""The real command on two processes: both ways to start it, one message for a failure, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONSOLE_SCRIPT = [str(Path(sysconfig.get_path("scripts"), "llmscale"))]
MODULE = [sys.executable, "-m", "lightning_llmscale"]
RUN = """\
seed_everything: 1
trainer:
  strategy: RingAllReduceStrategy
  accelerator: cpu
  devices: 2
  max_steps: 3
  logger: false
  enable_checkpointing: false
model: tests.multiprocess.cli_modules.{model}
"""


def llmscale(start: list[str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "LLMSCALE_"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [*start, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("start", [CONSOLE_SCRIPT, MODULE], ids=["console script", "module"])
def test_fit_trains_on_two_processes(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(model="Reporting"))
    done = llmscale(start, tmp_path, "fit", "--config=run.yaml")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0-of-2", "rank1-of-2"]


def test_a_failure_all_ranks_meet_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(model="Refusing"))
    done = llmscale(CONSOLE_SCRIPT, tmp_path, "fit", "--config=run.yaml")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "llmscale: error: the sample weighs -1; weigh it with 0 or more."
    ]


def test_a_failure_of_another_rank_is_told_by_the_first(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(model="RefusingOnRankOne"))
    done = llmscale(CONSOLE_SCRIPT, tmp_path, "fit", "--config=run.yaml")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert len(sentences) == 1
    assert "rank 1" in sentences[0]
    assert "the sample weighs -1" in sentences[0]


def test_a_bug_in_the_users_module_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(model="Buggy"))
    done = llmscale(CONSOLE_SCRIPT, tmp_path, "fit", "--config=run.yaml")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_mistake_starts_no_process_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(model="Reporting"))
    done = llmscale(
        CONSOLE_SCRIPT, tmp_path, "fit", "--config=run.yaml", "--data=WebDatasetDataModule",
        "--data.train=absent-*.tar", "--data.global_batch_size=2",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("llmscale: error: ")
    assert "GLOBAL_RANK" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
