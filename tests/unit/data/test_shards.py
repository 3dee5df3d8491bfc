from __future__ import annotations

from pathlib import Path

import pytest

from lightning_llmscale.data.shards import expand_shards
from lightning_llmscale.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ["a-000.tar", "a-001.tar", "b/a-002.tar", "b/notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("a-{000..001}.tar", ["a-000.tar", "a-001.tar"]),
        ("{b/a-002,a-000}.tar", ["b/a-002.tar", "a-000.tar"]),
        ("a-*.tar", ["a-000.tar", "a-001.tar"]),
        ("**/*.tar", ["a-000.tar", "a-001.tar", "b/a-002.tar"]),
        ("b", ["b/a-002.tar"]),
        ("a-001.tar::a-000.tar", ["a-001.tar", "a-000.tar"]),
        (["b/*.tar", "a-000.tar"], ["b/a-002.tar", "a-000.tar"]),
        ("a-000.tar", ["a-000.tar"]),
    ],
)
def test_patterns(folder: Path, patterns: str | list[str], expected: list[str]) -> None:
    assert expand_shards(patterns) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("a-{000..002}.tar", r"No shard at 'a-002\.tar' \(from train='a-\{000\.\.002\}\.tar'\) in "),
        ("c/*.tar", r"No shard at 'c/\*\.tar' in .*check the path"),
        ("", "train contains an empty pattern"),
        (["a-000.tar", " "], "train contains an empty pattern"),
        ([], r"train=\[\] names no shard"),
        (["a-*.tar", "a-001.tar"], r"names a-001\.tar twice"),
        ("a-{000..001.tar", "unbalanced braces"),
        ("pipe:cat a-000.tar; touch x", "would run a shell command"),
    ],
)
def test_a_wrong_pattern_is_named(folder: Path, patterns: str | list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        expand_shards(patterns)
