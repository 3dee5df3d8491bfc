from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from lightning_llmscale.data.convert import convert, plan_shards
from lightning_llmscale.data.index import index_path
from lightning_llmscale.data.inspection import index_shards, inspect_shards, plot_lengths, verify_shards
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.errors import ConfigurationError, DataError
from tests.unit.data.archives import random_texts, write_numbered, write_tar, write_texts


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {n}", "id": n}) for n in range(25)) + "\n\n")
    return str(path)


def contents(shards: list[Path]) -> list[tuple[str, Any]]:
    return [
        (sample["txt"], sample["json"]["id"])
        for sample in webdataset.WebDataset([str(path) for path in shards], shardshuffle=False).decode()
    ]


def test_jsonl_becomes_shards_with_indexes(tmp_path: Path, jsonl: str) -> None:
    seen: list[tuple[int, int]] = []
    shards = convert(
        [jsonl], str(tmp_path / "out/%04d.tar"), samples_per_shard=10, progress=lambda *at: seen.append(at)
    )
    assert contents(shards) == [(f"document {n}", n) for n in range(25)]
    assert [path.name for path in shards] == ["0000.tar", "0001.tar", "0002.tar"]
    assert all(index_path(path).exists() for path in shards)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_killed_conversion_goes_on_and_gives_the_same_bytes(tmp_path: Path, jsonl: str) -> None:
    first = convert([jsonl], str(tmp_path / "a/%04d.tar"), samples_per_shard=10)
    second = convert([jsonl], str(tmp_path / "b/%04d.tar"), samples_per_shard=10)
    second[1].unlink()
    (tmp_path / "b/0001.tar.part").write_bytes(b"half")
    kept = second[0].stat().st_mtime_ns
    assert convert([jsonl], str(tmp_path / "b/%04d.tar"), samples_per_shard=10) == second
    assert second[0].stat().st_mtime_ns == kept
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with pytest.raises(DataError, match="made from other inputs or with other options"):
        convert([jsonl], str(tmp_path / "b/%04d.tar"), samples_per_shard=5)


@pytest.mark.long
def test_processes_write_the_same_bytes(tmp_path: Path, jsonl: str) -> None:
    one = convert([jsonl], str(tmp_path / "a/%04d.tar"), samples_per_shard=5)
    two = convert([jsonl], str(tmp_path / "b/%04d.tar"), samples_per_shard=5, jobs=2)
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_folders_and_text_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "sub/a.txt").write_text("a")
    (tmp_path / "single.md").write_text("c")
    shards = convert([str(folder), str(tmp_path / "single.md")], str(tmp_path / "out/%d.tar"))
    samples = list(webdataset.WebDataset([str(path) for path in shards], shardshuffle=False).decode())
    assert [sample["txt"] for sample in samples] == ["b", "a", "c"]
    assert samples[1]["json"]["path"].endswith("sub/a.txt")


def test_tokens_can_be_stored(tmp_path: Path, jsonl: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"document": 0, "</s>": 1, "?": 2}, "unk_token": "?"}
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}))
    (shard,) = convert([jsonl], str(tmp_path / "out/%d.tar"), tokenizer=str(path))
    (first, *_) = webdataset.WebDataset(str(shard), shardshuffle=False).decode()
    assert first["tokens.npy"].tolist() == [0, 2, 1]
    assert first["tokens.npy"].dtype == np.uint16


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (['{"text": "a"}', "{"], {}, "record 2 is not JSON"),
        (['{"body": "a"}'], {}, "has no text in 'text' but body; name the field"),
        ([], {}, "nothing to pack"),
        (['{"text": "a"}'], {"tokenizer": "bytes"}, "does not tokenise text"),
    ],
)
def test_bad_inputs_are_named(tmp_path: Path, lines: list[str], options: dict[str, Any], message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises((DataError, ConfigurationError), match=message):
        convert([str(path)], str(tmp_path / "out/%d.tar"), **options)
    assert not list(tmp_path.glob("out/*.tar*"))


def test_a_missing_input_is_named() -> None:
    with pytest.raises(DataError, match="There is no nowhere"):
        plan_shards(["nowhere"], 10)


def test_index_and_verify(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [3, 4, 5])
    assert index_shards(ShardReader(shards)) == 12
    reports = verify_shards(ShardReader(shards), sha256=True, decode=True)
    assert [(report.samples, report.problems) for report in reports] == [(3, ()), (4, ()), (5, ())]
    assert all(len(report.sha256 or "") == 64 for report in reports)

    os.truncate(shards[0], 3000)
    index_path(shards[0]).unlink()
    os.truncate(shards[1], 3000)
    write_tar(Path(shards[2]), [("a.cls", b"1"), ("b.cls", b"one")])
    index_path(shards[2]).unlink()
    problems = [report.problems for report in verify_shards(ShardReader(shards), decode=True)]
    assert "is truncated" in problems[0][0]
    assert "which now has 3000" in problems[1][0]
    assert "member .cls of sample 'b' cannot be decoded" in problems[2][0]


def test_inspect_counts_and_draws(tmp_path: Path) -> None:
    texts = random_texts(0, 3)
    reader = ShardReader(write_texts(tmp_path, texts))
    summary = inspect_shards(reader, tokenizer="bytes")
    assert (summary.shards, summary.samples) == (3, sum(map(len, texts)))
    assert summary.tokens == sum(len(text) for shard in texts for text in shard)
    assert summary.extensions == {"txt": summary.samples}
    table = summary.table()
    assert "tokens a document, median" in table
    plot_lengths(summary, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert inspect_shards(reader).tokens is None
    with pytest.raises(DataError, match="Cannot write"):
        plot_lengths(summary, tmp_path / "missing" / "lengths.png")
