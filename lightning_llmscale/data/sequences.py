"""Sequences of tokens for language models, cut from the documents of a split.

Item ``k`` of an epoch is computed from the lengths of documents alone, so a run resumes without any state of the
packer.
"""

from __future__ import annotations

__all__ = ["IGNORED", "ConcatSource", "PackedSource", "PaddedSource", "TextSource"]

import hashlib
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_llmscale.data.order import Int, derive_key, permute
from lightning_llmscale.data.packing import best_fit, split_lengths
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.sources import Line, Source
from lightning_llmscale.data.tokens import TokenReader
from lightning_llmscale.errors import DataError

IGNORED = -100
"""Label of a position that predicts nothing; what ``torch.nn.functional.cross_entropy`` ignores."""

_DOCUMENTS = 4
_KEPT = 256  # shards whose tables stay in memory

T = TypeVar("T")


class _Recent(OrderedDict[int, T]):
    """The tables of the shards used last."""

    def get_or(self, key: int, make: Callable[[], T]) -> T:
        if key not in self:
            self[key] = make()
            if len(self) > _KEPT:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class TextSource(Source):
    """Documents of a split.

    Args:
        reader: The shards.
        seed: Seed of the order.
        seq_len: Tokens in a sequence.
        tokens: Reads the tokens of a document.
        text_key: Extension of the member that holds a document.
        document_ids: Whether items carry ``document_ids`` and ``position_ids``.
        name: The split, for error messages.
    """

    packing: str

    def __init__(
        self,
        reader: ShardReader,
        seed: int,
        seq_len: int,
        tokens: TokenReader,
        text_key: str,
        document_ids: bool,
        name: str,
    ) -> None:
        self.seq_len, self.tokens, self.text_key, self.document_ids = seq_len, tokens, text_key, document_ids
        self.token_counts = np.zeros(len(reader.shards), np.int64)
        self._documents: _Recent[tuple[Int, Int]] = _Recent()
        self._pieces: _Recent[tuple[Int, Int]] = _Recent()
        super().__init__(reader, seed)
        total = int(self.token_counts.sum())
        self._count(total)
        if self.items < 1:
            raise DataError(
                f"seq_len={seq_len} is longer than the data: {name} holds {total} tokens in {len(self.shards)} shards "
                f"and a sequence needs {seq_len + 1}; use seq_len of at most {max(1, total - 1)}, or more data."
            )

    @abstractmethod
    def _count(self, total: int) -> None:
        """Set ``items`` and what goes with it."""

    def _measure(self, shard: int) -> int:
        lengths = self.documents(shard)[1]
        self.token_counts[shard] = lengths.sum()
        return len(lengths)

    def documents(self, shard: int) -> tuple[Int, Int]:
        """Member and number of tokens, with the separator, of each document of a shard."""

        def make() -> tuple[Int, Int]:
            index, name = self.reader.index(shard), self.shards[shard]
            members = index.member_of(self.text_key, name)
            lengths = self.tokens.lengths(index, members, lambda: self.reader.open(shard)[1], name)
            return members, lengths + (self.tokens.separator is not None)

        return self._documents.get_or(shard, make)

    def copy_document(self, out: Int, shard: int, member: int, length: int, start: int) -> None:
        """Write tokens of a document of ``length`` tokens from ``start`` on, as many as ``out`` takes."""
        separator = self.tokens.separator
        text = length - (separator is not None)
        take = min(len(out), text - start)
        if take > 0:
            index, view = self.reader.open(shard)
            first = int(index.offset[member])
            out[:take] = self.tokens.read(view[first : first + int(index.size[member])], start, take)
        if separator is not None and start + len(out) == length:
            out[-1] = separator

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Source.fingerprint`."""
        return super().fingerprint() | {
            "seq_len": self.seq_len,
            "packing": self.packing,
            "tokenizer": self.tokens.name,
            "tokens": int(self.token_counts.sum()),
            "sizes": hashlib.sha256(self.token_counts.astype("<i8").tobytes()).hexdigest()[:16],
        }


class ConcatSource(TextSource):
    """Documents joined to one stream and cut.

    The documents of an epoch, shuffled inside their shard and each ended by the separator, make one stream along the
    line of shards. Sequence ``k`` reads tokens ``k * T`` to ``k * T + T`` of it: ``T`` inputs, and as labels the same
    shifted by one, so each token but the first of the stream is predicted exactly once. At the end of an epoch less
    than one sequence is left over; as the remainder of the epoch it is the last ``T`` tokens, with labels only where
    no other sequence has them.
    """

    packing = "concat"

    def _count(self, total: int) -> None:
        self.items, self.remainder = divmod(max(0, total - 1), self.seq_len)
        self.item_weight = self.seq_len

    def line(self, epoch: int | None) -> Line:
        """See :meth:`Source.line`."""
        return _ConcatLine(self, epoch)


class _ConcatLine(Line):
    def __init__(self, source: ConcatSource, epoch: int | None) -> None:
        self._source, self._epoch = source, epoch
        order = source.shard_order(epoch)
        edges = np.concatenate([[0], np.cumsum(source.token_counts[order])]).astype(np.int64)
        self._edges = array("q", edges.tobytes())
        # a sequence belongs to the shard in which it starts
        self._first = np.minimum(-(-edges // source.seq_len), source.items)
        super().__init__(np.diff(self._first), order)
        self._documents: _Recent[tuple[array[int], array[int], array[int]]] = _Recent()

    def read(self, place: int, item: int) -> dict[str, Any]:
        source = self._source
        start = int(self._first[place] + item) * source.seq_len
        if place < 0:
            start = source.items * source.seq_len - (source.seq_len - source.remainder)
        tokens = np.empty(source.seq_len + 1, np.int64)
        ids = np.empty((2, source.seq_len + 1), np.int64) if source.document_ids else None
        self._fill(start, tokens, ids)
        labels = tokens[1:]
        if place < 0:
            labels = labels.copy()
            labels[: source.seq_len - source.remainder] = IGNORED
        result = {"input_ids": torch.from_numpy(tokens[:-1]), "labels": torch.from_numpy(labels)}
        if ids is not None:
            result["document_ids"] = torch.from_numpy(ids[0, :-1])
            result["position_ids"] = torch.from_numpy(ids[1, :-1])
        return result

    def _fill(self, start: int, out: Int, ids: Int | None) -> None:
        """Write the tokens of the epoch's stream from ``start`` on, and the document and the place in it of each."""
        place = bisect_right(self._edges, start) - 1
        filled, offset, count, length = 0, start - self._edges[place], 0, len(out)
        while filled < length:
            members, lengths, ends = self._shuffled_documents(place)
            shard, number = int(self.shards[place]), bisect_right(ends, offset)
            while filled < length and number < len(members):
                size, end = lengths[number], ends[number]
                first = offset - (end - size)
                take = min(size - first, length - filled)
                self._source.copy_document(out[filled : filled + take], shard, members[number], size, first)
                if ids is not None:
                    ids[0, filled : filled + take] = count
                    ids[1, filled : filled + take] = np.arange(take)  # what came before is not in this sequence
                filled, offset, number, count = filled + take, end, number + 1, count + 1
            place, offset = place + 1, 0

    def _shuffled_documents(self, place: int) -> tuple[array[int], array[int], array[int]]:
        """Members and lengths of a shard's documents in this epoch's order, and where each ends in its stream."""

        def make() -> tuple[array[int], array[int], array[int]]:
            shard = int(self.shards[place])
            members, lengths = self._source.documents(shard)
            if self._epoch is not None:
                key = derive_key(self._source.seed, self._epoch, _DOCUMENTS, shard)
                order = permute(np.arange(len(members)), len(members), key)
                members, lengths = members[order], lengths[order]
            columns = (members, lengths, np.cumsum(lengths))
            return tuple(array("q", column.astype(np.int64).tobytes()) for column in columns)  # type: ignore[return-value]

        return self._documents.get_or(place, make)


class PackedSource(TextSource):
    """Whole documents, or pieces of those longer than a sequence, side by side in sequences; the rest is padding.

    A document of ``n`` tokens and its separator gives ``n`` inputs, each with the token that follows as its label, so
    no sequence predicts across documents. Which documents share a sequence is fixed by best fit inside each shard;
    the order of sequences changes with the epoch. Padding has label -100 and document id -1.
    """

    packing = "best_fit"

    def _measure(self, shard: int) -> int:
        super()._measure(shard)
        return len(self.bins(shard)) - 1

    def _count(self, total: int) -> None:
        self.items = int(self.samples.sum())

    def line(self, epoch: int | None) -> Line:
        """See :meth:`Source.line`."""
        return _PackedLine(self, self.shard_order(epoch))

    def bins(self, shard: int) -> Int:
        """Where the pieces of each sequence of a shard begin in :meth:`pieces`."""
        return self.pieces(shard)[1]

    def pieces(self, shard: int) -> tuple[Int, Int]:
        """Pieces as rows (document, start, length), sorted by sequence, and where each sequence begins."""
        return self._pieces.get_or(shard, lambda: self._pack(shard))

    def _pack(self, shard: int) -> tuple[Int, Int]:
        lengths = self.documents(shard)[1]
        rows = np.stack(split_lengths(np.maximum(lengths - 1, 0), self.seq_len), axis=1)
        number = self._assign(rows[:, 2])
        order = np.argsort(number, kind="stable")
        return rows[order], np.searchsorted(number[order], np.arange(number.max(initial=-1) + 2))

    def _assign(self, lengths: Int) -> Int:
        return best_fit(lengths, self.seq_len)


class PaddedSource(PackedSource):
    """One document, or a piece of one, in each sequence, padded to its length."""

    packing = "none"

    def _assign(self, lengths: Int) -> Int:
        return np.arange(len(lengths))


class _PackedLine(Line):
    def __init__(self, source: PackedSource, order: Int) -> None:
        super().__init__(source.samples[order], order)
        self._source = source

    def read(self, place: int, item: int) -> dict[str, Any]:
        source, shard = self._source, int(self.shards[place])
        rows, begins = source.pieces(shard)
        members, lengths = source.documents(shard)
        padding = source.tokens.separator or 0
        inputs, labels = np.full(source.seq_len, padding, np.int64), np.full(source.seq_len, IGNORED, np.int64)
        documents, positions = np.full(source.seq_len, -1, np.int64), np.zeros(source.seq_len, np.int64)
        at = 0
        for count, (document, start, length) in enumerate(rows[begins[item] : begins[item + 1]].tolist()):
            both = np.empty(length + 1, np.int64)
            source.copy_document(both, shard, int(members[document]), int(lengths[document]), start)
            part = slice(at, at + length)
            inputs[part], labels[part], documents[part], positions[part] = both[:-1], both[1:], count, np.arange(length)
            at += length
        result = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if source.document_ids:
            result["document_ids"] = torch.from_numpy(documents)
            result["position_ids"] = torch.from_numpy(positions)
        return result
