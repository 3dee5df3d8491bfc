"""What a split of a dataset holds.

A source answers two questions for an epoch: how many items lie in each shard along the line (the input of
:mod:`.order`), and what item ``i`` of the shard at place ``j`` is. Both are random access, so neither needs any state.
"""

from __future__ import annotations

__all__ = ["Line", "SampleSource", "Source"]

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llmscale.data.decoding import decode_sample
from lightning_llmscale.data.order import Int, derive_key, permute
from lightning_llmscale.data.reader import ShardReader

_SHARDS = 3


class Line(ABC):
    """The shards of an epoch, in order, and the items they hold.

    Args:
        counts: Items of each shard along the line.
    """

    def __init__(self, counts: Int) -> None:
        self.counts = counts

    @abstractmethod
    def read(self, place: int, item: int) -> dict[str, Any]:
        """Return an item of the shard at a place of the line; place -1 is what the remainder of the epoch fills."""


class Source(ABC):
    """The items of a list of shards.

    Args:
        shards: Local tar shards.
        seed: Seed of the order of shards and documents.

    Attributes:
        items: Items in one epoch.
        samples: Samples in each shard.
        item_weight: What an item counts in a mean of losses.
        remainder: The same of what is left over when an epoch is cut into items; 0 for nothing.
    """

    items: int
    item_weight: int = 1
    remainder: int = 0

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
