"""What the commands accept and print: every way to write a strategy, the round trip of a configuration, the help."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_llmscale.cli.main import COMMANDS
from lightning_llmscale.strategies.catalog import STRATEGIES
from tests.unit.cli.runs import MODULE, command

RING = "lightning_llmscale.RingAllReduceStrategy"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--trainer.strategy={RING}"],
        ["--trainer.strategy=RingAllReduceStrategy"],
        [f"--trainer.strategy.class_path={RING}"],
        ["--trainer.strategy.class_path=RingAllReduceStrategy"],
        [f"--trainer.strategy={{class_path: {RING}}}"],
    ],
)
def test_a_strategy_class_on_the_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = command(
        capsys, "fit", f"--model={MODULE}", *arguments, "--trainer.strategy.bucket_cap_mb=7", "--print_config"
    )
    strategy = yaml.safe_load(done.out)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("RingAllReduceStrategy")
    assert strategy["init_args"]["bucket_cap_mb"] == 7.0


@pytest.mark.parametrize(
    "value",
    [RING, "RingAllReduceStrategy", f"{{class_path: {RING}}}", "{class_path: RingAllReduceStrategy}"],
)
def test_a_strategy_class_in_yaml(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(f"model: {MODULE}\ntrainer: {{strategy: {value}}}\n")
    strategy = yaml.safe_load(command(capsys, "fit", "--config=run.yaml", "--print_config").out)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("RingAllReduceStrategy")
    assert strategy["init_args"]["algorithm"] == "auto"


@pytest.mark.parametrize("name", ["ring_allreduce", "ddp", "auto"])
def test_a_registered_name_stays_a_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "fit", f"--model={MODULE}", f"--trainer.strategy={name}", "--print_config")
    assert yaml.safe_load(done.out)["trainer"]["strategy"] == name


def test_the_printed_configuration_reads_back_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    first = command(
        capsys, "fit", f"--model={MODULE}", "--model.width=3", f"--trainer.strategy={RING}",
        "--trainer.strategy.uneven=error", "--trainer.devices=2", "--data=WebDatasetDataModule",
        "--data.train=a.tar", "--data.global_batch_size=4", "--print_config",
    )  # fmt: skip
    assert first.code == 0
    Path("run.yaml").write_text(first.out)
    assert command(capsys, "fit", "--config=run.yaml", "--print_config").out == first.out


def test_the_strategies_are_listed_with_their_use_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "strategies")
    folded = " ".join(done.out.split())
    assert done.code == 0
    for entry in STRATEGIES.values():
        assert entry.class_path in folded
        assert entry.summary in folded
        for feature, message in entry.refuses.items():
            assert f"{feature}: {message}" in folded


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), ([], 2)):
        done = command(capsys, *arguments)
        assert done.code == code
        assert all(f"  {name}" in done.out for name in COMMANDS)


def test_help_of_a_strategy_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "fit", f"--trainer.strategy.help={RING}")
    assert done.code == 0
    assert "peer_timeout" in done.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    done = command(capsys, "--version")
    assert done.code == 0
    assert done.out.startswith("llmscale ")
    assert "torch" in done.out
