"""What `llmscale verify` refuses before it starts a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification import verify
from lightning_llmscale.verification.cli import run


def never(arguments: Sequence[str], trainer_options: Mapping[str, Any]) -> Any:
    raise AssertionError("nothing may be built")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name a run, for example --config run.yaml"),
        (["--config=run.yaml", "--steps=0"], "steps=0"),
        (["--config=run.yaml", "--lr=1", "--optimizer=user"], "cannot take effect"),
        (["--config=run.yaml", "--json=no/such/folder/out.json"], "--json no/such/folder/out.json cannot be written"),
        (["--config=run.yaml", "--timeout=0"], "timeout=0"),
    ],
)
def test_bad_input_is_2_in_one_sentence(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args, never) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("llmscale verify: error: ")
    assert words in lines[0]


@pytest.mark.parametrize("args", [["--steps=many"], ["--optimizer=adam"]])
def test_a_value_of_the_wrong_kind_is_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(["--config=run.yaml", *args], never)
    assert end.value.code == 2


def test_help_explains_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(["--help"], never)
    assert end.value.code == 0
    assert "exit code: 0 equal, 1 different" in capsys.readouterr().out


def test_a_file_where_recordings_should_go(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used for the recordings"):
        verify(never, folder=tmp_path / "file")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    with pytest.raises(ConfigurationError, match="holds other things"):
        verify(never, folder=tmp_path)
    assert (tmp_path / "strategy").exists()


def test_ranks_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="without torchrun"):
        verify(never)


def test_a_build_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="top level of a module"):
        verify(lambda arguments, trainer_options: never(arguments, trainer_options))
