from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.sequences import IGNORED, ConcatSource, PackedSource, PaddedSource, TextSource
from lightning_llmscale.data.tokens import ByteTokens
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import random_texts, write_texts

SEPARATOR = 256


def source(
    paths: list[str], seq_len: int, seed: int = 0, kind: type[TextSource] = ConcatSource, ids: bool = False
) -> TextSource:
    return kind(ShardReader(paths), seed, seq_len, ByteTokens(), "txt", ids, "train")


def sequences(source: TextSource, epoch: int | None) -> list[tuple[list[int], list[int]]]:
    line = source.line(epoch)
    return [
        (item["input_ids"].tolist(), item["labels"].tolist())
        for place, count in enumerate(line.counts.tolist())
        for item in (line.read(place, number) for number in range(count))
    ]


@pytest.mark.parametrize("seq_len", [1, 3, 64, 1000])
def test_stored_order_is_the_concatenation_of_the_documents(tmp_path: Path, seq_len: int) -> None:
    texts = random_texts(1, 5)
    stream = [token for shard in texts for text in shard for token in [*text, SEPARATOR]]
    result = sequences(source(write_texts(tmp_path, texts), seq_len), None)
    assert len(result) == (len(stream) - 1) // seq_len
    for number, (inputs, labels) in enumerate(result):
        start = number * seq_len
        assert inputs == stream[start : start + seq_len]
        assert labels == stream[start + 1 : start + seq_len + 1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_shuffled_epoch_holds_every_document_once(tmp_path: Path, epoch: int) -> None:
    texts = random_texts(2, 6)
    data = source(write_texts(tmp_path, texts), 7)
    stream: list[int] = []
    for inputs, labels in sequences(data, epoch):
        if stream:
            assert inputs[0] == stream[-1]  # sequences of one epoch follow each other without a gap
            stream.pop()
        stream += [*inputs, labels[-1]]
    total = sum(len(text) + 1 for shard in texts for text in shard)
    assert total - 7 <= len(stream) <= total
    documents = "".join(chr(token) for token in stream).split(chr(SEPARATOR))
    left = [text.decode() for shard in texts for text in shard]
    for document in documents[:-1]:
        left.remove(document)
    assert len("".join(left)) <= total - len(stream) + len(documents[-1])


def test_epochs_differ_and_repeat_with_the_seed(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, random_texts(3, 4))
    first = sequences(source(paths, 16), 0)
    assert first == sequences(source(paths, 16), 0)
    assert first != sequences(source(paths, 16), 1)
    assert first != sequences(source(paths, 16, seed=1), 0)


def test_a_sequence_may_span_many_shards(tmp_path: Path) -> None:
    data = source(write_texts(tmp_path, [[b"a"]] * 40), 30)
    assert data.items == 2
    assert [inputs for inputs, _ in sequences(data, None)][1] == [97, SEPARATOR] * 15


def test_data_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, [[b"abc"], [b"de"]])
    assert source(paths, 6).items == 1
    with pytest.raises(
        DataError, match=r"seq_len=7 is longer than the data: train holds 7 tokens in 2 shards .*at most 6"
    ):
        source(paths, 7)


def test_tokens_are_int64(tmp_path: Path) -> None:
    line = source(write_texts(tmp_path, [[b"abc"]]), 2).line(None)
    assert str(line.read(0, 0)["input_ids"].dtype) == "torch.int64"
    assert np.issubdtype(line.counts.dtype, np.integer)


def test_the_remainder_holds_the_tokens_that_no_sequence_predicts(tmp_path: Path) -> None:
    texts = random_texts(4, 3)
    stream = [token for shard in texts for text in shard for token in [*text, SEPARATOR]]
    data = source(write_texts(tmp_path, texts), 50)
    last = data.line(None).read(-1, -1)
    assert data.remainder == (len(stream) - 1) % 50 > 0
    assert last["input_ids"].tolist() == stream[-51:-1]
    assert last["labels"].tolist() == [IGNORED] * (50 - data.remainder) + stream[-data.remainder :]


def test_concat_numbers_documents_and_positions(tmp_path: Path) -> None:
    data = source(write_texts(tmp_path, [[b"abc", b"", b"defgh"], [b"ij"]]), 6, ids=True)
    line = data.line(None)
    first, second = line.read(0, 0), line.read(0, 1)
    assert first["document_ids"].tolist() == [0, 0, 0, 0, 1, 2]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 0]
    assert second["document_ids"].tolist() == [0, 0, 0, 0, 0, 1]
    assert second["position_ids"].tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
@pytest.mark.parametrize("seq_len", [5, 64, 500])
def test_packing_keeps_every_token_and_every_document_whole(
    tmp_path: Path, kind: type[TextSource], seq_len: int
) -> None:
    texts = random_texts(5, 4)
    data = source(write_texts(tmp_path, texts), seq_len, kind=kind, ids=True)
    pieces = []
    for epoch in (0, 1):
        line = data.line(epoch)
        pieces.append([])
        for place, count in enumerate(line.counts.tolist()):
            for number in range(count):
                item = {name: value.tolist() for name, value in line.read(place, number).items()}
                for document in range(max(item["document_ids"]) + 1):
                    use = [i for i, value in enumerate(item["document_ids"]) if value == document]
                    assert [item["position_ids"][i] for i in use] == list(range(len(use)))
                    inputs, labels = ([item[name][i] for i in use] for name in ("input_ids", "labels"))
                    assert inputs[1:] == labels[:-1]
                    pieces[-1].append((tuple(inputs), labels[-1]))
                padding = [i for i, value in enumerate(item["document_ids"]) if value < 0]
                assert {item["labels"][i] for i in padding} <= {IGNORED}
    expected = [
        (tuple(whole[start : start + seq_len]), [*whole, SEPARATOR][min(start + seq_len, len(whole))])
        for shard in texts
        for text in shard
        if (whole := list(text))
        for start in range(0, len(whole), seq_len)
    ]
    assert sorted(pieces[0]) == sorted(pieces[1]) == sorted(expected)
