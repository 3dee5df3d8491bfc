from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.data.packing import best_fit, split_lengths
from lightning_llmscale.data.tokens import TextTokens, make_token_reader
from lightning_llmscale.errors import ConfigurationError, DataError
from tests.unit.data.archives import flat, write_tar


def stored(folder: Path, documents: list[np.ndarray[Any, Any]], extension: str) -> str:
    members = []
    for number, document in enumerate(documents):
        raw = io.BytesIO()
        if extension == "npy":
            np.save(raw, document)
        else:
            raw.write(document.tobytes())
        members.append((f"{number:04d}.{extension}", raw.getvalue()))
    return str(write_tar(folder / f"{extension}.tar", members))


def stream(shard: str, **options: Any) -> list[int]:
    data = WebDatasetDataModule(val=shard, global_batch_size=1, **options)
    data.setup("validate")
    return flat(batch["input_ids"].flatten().tolist() for batch in data.val_dataloader())


@pytest.mark.parametrize("extension", ["npy", "bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_stored_tokens_are_read_as_they_are(tmp_path: Path, extension: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 60_000, n).astype(dtype) for n in (5, 1, 0, 40, 17)]
    shard = stored(tmp_path, documents, extension)
    tokens = np.concatenate(documents).tolist()
    assert stream(shard, seq_len=7, tokenizer=dtype, text_key=extension) == tokens[: (len(tokens) - 1) // 7 * 7]


def test_tokens_of_another_type_are_refused(tmp_path: Path) -> None:
    shard = stored(tmp_path, [np.arange(5, dtype=np.uint16)], "bin")
    with pytest.raises(DataError, match=r"document 0 has 10 bytes of tokens, no whole number of uint32"):
        stream(shard, seq_len=2, tokenizer="uint32", text_key="bin")
    shard = stored(tmp_path, [np.arange(5.0)], "npy")
    with pytest.raises(DataError, match=r"an array of float64 with shape \(5,\), not a row of uint16"):
        stream(shard, seq_len=2, tokenizer="uint16", text_key="npy")


def words(folder: Path) -> str:
    return str(
        write_tar(folder / "a.tar", [(f"{n}.txt", text.encode()) for n, text in enumerate(["a b c", "b", "c c a"])])
    )


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "c": 2, "<|endoftext|>": 3}
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<|endoftext|>"}
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}))
    assert stream(words(tmp_path), seq_len=3, tokenizer=str(path)) == [0, 1, 2, 3, 1, 3, 2, 2, 0]


def test_a_tokenizer_that_changes_lengths(tmp_path: Path) -> None:
    reader = TextTokens("words", 4, 3, lambda text: ["abc".index(word) for word in text.split()])
    data = WebDatasetDataModule(val=words(tmp_path), global_batch_size=1, seq_len=3)
    data._options = replace(data._options, tokens=reader)
    data.setup("validate")
    assert flat(b["input_ids"][0].tolist() for b in data.val_dataloader()) == [0, 1, 2, 3, 1, 3, 2, 2, 0]


def test_undecodable_text_is_named(tmp_path: Path) -> None:
    shard = str(write_tar(tmp_path / "a.tar", [("0.txt", b"fine"), ("1.txt", b"\xff\xfe")]))
    data = WebDatasetDataModule(val=shard, global_batch_size=1, seq_len=1)
    data._options = replace(data._options, tokens=TextTokens("words", 4, 3, lambda text: [0]))
    with pytest.raises(DataError, match=r"a\.tar: document 1 is not UTF-8 text"):
        data.setup("validate")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2.json", "neither 'bytes', 'uint16'"),
        ("tiktoken:gpt2", "needs the package tiktoken; run: pip install tiktoken"),
    ],
)
def test_unknown_tokenizers_are_refused(name: str, message: str) -> None:
    if name.startswith("tiktoken"):
        try:
            import tiktoken  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("tiktoken is installed")
    with pytest.raises(ConfigurationError, match=message):
        make_token_reader(name, "txt")


def test_split_lengths_drops_nothing() -> None:
    document, start, length = split_lengths(np.array([3, 0, 10, 4]), 4)
    assert document.tolist() == [0, 2, 2, 2, 3]
    assert start.tolist() == [0, 0, 4, 8, 0]
    assert length.tolist() == [3, 4, 4, 2, 4]


@pytest.mark.parametrize("capacity", [10, 1024])
def test_best_fit_never_overfills(capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 2000)
    bins = best_fit(lengths, capacity)
    assert np.bincount(bins, lengths).max() <= capacity
    assert set(bins.tolist()) == set(range(bins.max() + 1))
    assert bins.max() + 1 <= lengths.sum() / capacity * 11 / 9 + 4


def test_padding_of_best_fit_is_below_one_percent_on_log_normal_lengths() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(5.5, 1.0, 4000)).astype(np.int64)
    _, _, pieces = split_lengths(lengths, 1024)
    bins = best_fit(pieces, 1024)
    assert 1 - pieces.sum() / ((bins.max() + 1) * 1024) < 0.01
