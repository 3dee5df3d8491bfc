"""What a split of a dataset holds: whole samples, or sequences of tokens cut from its concatenated documents.

A source answers two questions for an epoch: how many items lie in each shard along the line (the input of
:mod:`.order`), and what item ``i`` of the shard at place ``j`` is. Both are random access, so neither needs any state.
"""

from __future__ import annotations

__all__ = ["SEPARATOR", "VOCAB_SIZE", "Line", "SampleSource", "SequenceSource", "Source"]

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_llmscale.data.decoding import decode_sample
from lightning_llmscale.data.order import Int, derive_key, permute
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.errors import DataError

SEPARATOR = 256
"""Token that ends each document; tokens 0 to 255 are the bytes of the text."""
VOCAB_SIZE = 257

_SHARDS, _DOCUMENTS = 3, 4


class Line(ABC):
    """The shards of an epoch, in order, and the items they hold.

    Args:
        counts: Items of each shard along the line.
    """

    def __init__(self, counts: Int) -> None:
        self.counts = counts

    @abstractmethod
    def read(self, place: int, item: int) -> dict[str, Any]:
        """Return an item of the shard at a place of the line."""


class Source(ABC):
    """The items of a list of shards.

    Args:
        shards: Local tar shards.
        seed: Seed of the order of shards and documents.

    Attributes:
        items: Items in one epoch.
        samples: Samples in each shard.
    """

    items: int

    def __init__(self, shards: list[Path], seed: int) -> None:
        self.shards = shards
        self.seed = seed
        self.reader = ShardReader(shards)
        self.samples = np.array([self._measure(number) for number in range(len(shards))], np.int64)

    def _measure(self, shard: int) -> int:
        return len(self.reader.open(shard)[0])

    @abstractmethod
    def line(self, epoch: int | None) -> Line:
        """Lay out an epoch; ``None`` gives the stored order."""

    def shard_order(self, epoch: int | None) -> Int:
        """Shard numbers along the line."""
        stored = np.arange(len(self.shards))
        return stored if epoch is None else permute(stored, len(stored), derive_key(self.seed, epoch, _SHARDS))

    def fingerprint(self) -> dict[str, Any]:
        """Describe the data so that a resumed run can tell whether it is still the same."""
        names = "\n".join(path.name for path in self.shards)
        return {
            "shards": len(self.shards),
            "samples": int(self.samples.sum()),
            "names": hashlib.sha256(names.encode()).hexdigest()[:16],
            "counts": hashlib.sha256(self.samples.astype("<i8").tobytes()).hexdigest()[:16],
        }


class SampleSource(Source):
    """One item is one decoded sample: a dict of ``__key__``, ``__url__`` and an entry for each extension."""

    def __init__(self, shards: list[Path], seed: int) -> None:
        super().__init__(shards, seed)
        self.items = int(self.samples.sum())

    def line(self, epoch: int | None) -> Line:
        """See :meth:`Source.line`."""
        return _SampleLine(self, self.shard_order(epoch))


class _SampleLine(Line):
    def __init__(self, source: SampleSource, order: Int) -> None:
        super().__init__(source.samples[order])
        self._source, self._order = source, order

    def read(self, place: int, item: int) -> dict[str, Any]:
        shard = int(self._order[place])
        reader = self._source.reader
        key = reader.open(shard)[0].key(item)
        return decode_sample(key, str(reader.paths[shard]), reader.sample(shard, item))


class SequenceSource(Source):
    """One item is a sequence of tokens.

    The documents of an epoch, shuffled inside their shard and each ended by :data:`SEPARATOR`, make one stream along
    the line of shards. Sequence ``k`` reads tokens ``k * T`` to ``k * T + T`` of it: ``T`` inputs, and as labels the
    same shifted by one, so each token but the first of the stream is predicted exactly once. At the end of an epoch
    less than one sequence is left over. Bytes are the tokens, so the lengths of documents are known from the index,
    and the place of any token of the stream is found by bisection.

    Args:
        shards: Local tar shards.
        seed: Seed of the order.
        seq_len: ``T``, tokens in a sequence.
        text_key: Extension of the member that holds the text.
        name: The split, for error messages.
    """

    def __init__(self, shards: list[Path], seed: int, seq_len: int, text_key: str, name: str) -> None:
        self.seq_len, self.text_key = seq_len, text_key
        self.tokens = np.zeros(len(shards), np.int64)
        super().__init__(shards, seed)
        total = int(self.tokens.sum())
        self.items = (total - 1) // seq_len
        if self.items < 1:
            raise DataError(
                f"seq_len={seq_len} is longer than the data: {name} holds {total} tokens in {len(shards)} shards and a "
                f"sequence needs {seq_len + 1}; use seq_len of at most {total - 1}, or more data."
            )

    def _measure(self, shard: int) -> int:
        lengths = self._lengths(shard)
        self.tokens[shard] = lengths.sum()
        return len(lengths)

    def _lengths(self, shard: int) -> Int:
        """Tokens of each document, with its separator."""
        index, _ = self.reader.open(shard)
        return index.size[index.member_of(self.text_key, str(self.shards[shard]))] + 1

    def line(self, epoch: int | None) -> Line:
        """See :meth:`Source.line`."""
        return _SequenceLine(self, epoch)

    def fingerprint(self) -> dict[str, Any]:
        """See :meth:`Source.fingerprint`."""
        sizes = hashlib.sha256(self.tokens.astype("<i8").tobytes()).hexdigest()[:16]
        return super().fingerprint() | {"seq_len": self.seq_len, "tokens": int(self.tokens.sum()), "sizes": sizes}


class _SequenceLine(Line):
    def __init__(self, source: SequenceSource, epoch: int | None) -> None:
        self._source, self._epoch = source, epoch
        self._order = source.shard_order(epoch)
        self._edges = np.concatenate([[0], np.cumsum(source.tokens[self._order])])
        # a sequence belongs to the shard in which it starts
        self._first = np.minimum(-(-self._edges // source.seq_len), source.items)
        super().__init__(np.diff(self._first))
        self._documents: OrderedDict[int, tuple[Int, Int]] = OrderedDict()

    def read(self, place: int, item: int) -> dict[str, Any]:
        length = self._source.seq_len
        tokens = torch.from_numpy(self._tokens(int(self._first[place] + item) * length, length + 1))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def _tokens(self, start: int, length: int) -> Int:
        """Tokens ``start`` to ``start + length`` of the epoch's stream."""
        out = np.full(length, SEPARATOR, np.int64)
        place = int(np.searchsorted(self._edges, start, "right")) - 1
        filled, offset = 0, start - int(self._edges[place])
        while filled < length:
            members, ends = self._shuffled_documents(place)
            shard = int(self._order[place])
            index, view = self._source.reader.open(shard)
            number = int(np.searchsorted(ends, offset, "right"))
            while filled < length and number < len(members):
                end, member = int(ends[number]), int(members[number])
                size = int(index.size[member])
                skip = offset - (end - size - 1)
                take = min(size - skip, length - filled)  # 0 when only the separator is left
                first = int(index.offset[member]) + skip
                out[filled : filled + take] = np.frombuffer(view[first : first + take], np.uint8)
                filled += min(end - offset, length - filled)
                offset, number = end, number + 1
            place, offset = place + 1, 0
        return out

    def _shuffled_documents(self, place: int) -> tuple[Int, Int]:
        """Members of a shard's documents in this epoch's order, and where each ends in the shard's token stream."""
        entry = self._documents.get(place)
        if entry is None:
            source, shard = self._source, int(self._order[place])
            index, _ = source.reader.open(shard)
            members = index.member_of(source.text_key, str(source.shards[shard]))
            if self._epoch is not None:
                key = derive_key(source.seed, self._epoch, _DOCUMENTS, shard)
                members = members[permute(np.arange(len(members)), len(members), key)]
            entry = self._documents[place] = members, np.cumsum(index.size[members] + 1)
            if len(self._documents) > 512:
                self._documents.popitem(last=False)
        return entry
