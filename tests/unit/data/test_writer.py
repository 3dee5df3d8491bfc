from __future__ import annotations

import os
from pathlib import Path

import pytest
import webdataset

from lightning_llmscale.data import pack_text_files
from lightning_llmscale.errors import ConfigurationError, DataError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{n}.py" for n in range(7)]
    for n, path in enumerate(paths):
        path.write_text(f"# file {n} \u00e9\n" * 20)
    return paths


def test_webdataset_reads_what_was_packed(tmp_path: Path, files: list[Path]) -> None:
    shards = pack_text_files(files, str(tmp_path / "out/train-%06d.tar"), samples_per_shard=3)
    assert [path.name for path in shards] == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]
    assert sorted(os.listdir(tmp_path / "out")) == [path.name for path in shards]
    read = list(webdataset.WebDataset([str(p) for p in shards], shardshuffle=False).decode())
    assert [sample["__key__"] for sample in read] == [f"{n:08d}" for n in range(7)]
    assert [sample["txt"] for sample in read] == [path.read_text() for path in files]


def test_the_same_files_give_the_same_bytes(tmp_path: Path, files: list[Path]) -> None:
    first = pack_text_files(files, str(tmp_path / "a/%03d.tar"))
    for path in files:
        os.utime(path, (1, 1))
    second = pack_text_files(files, str(tmp_path / "b/%03d.tar"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_keys_can_be_given(tmp_path: Path, files: list[Path]) -> None:
    shards = pack_text_files({f"lib/{p.stem}": p for p in files}, str(tmp_path / "%03d.tar"), shard_bytes=500)
    keys = [s["__key__"] for s in webdataset.WebDataset([str(p) for p in shards], shardshuffle=False)]
    assert keys == [f"lib/{p.stem}" for p in files]
    assert len(shards) > 1


def test_what_is_not_text_leaves_no_shard_behind(tmp_path: Path, files: list[Path]) -> None:
    files[5].write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"5\.py is not UTF-8 text"):
        pack_text_files(files, str(tmp_path / "out/%03d.tar"))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("pattern", ["shard.tar", "%s-%d.tar", "a%"])
def test_a_pattern_without_a_number_is_refused(files: list[Path], pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="no place for the shard's number"):
        pack_text_files(files, pattern)


def test_unreadable_files_and_folders_are_named(tmp_path: Path, files: list[Path]) -> None:
    with pytest.raises(DataError, match=r"Cannot read .*missing\.py"):
        pack_text_files([tmp_path / "missing.py"], str(tmp_path / "%03d.tar"))
    with pytest.raises(DataError, match="nothing to pack"):
        pack_text_files([], str(tmp_path / "%03d.tar"))
    with pytest.raises(DataError, match="Cannot write shards"):
        pack_text_files(files, str(files[0] / "%03d.tar"))
