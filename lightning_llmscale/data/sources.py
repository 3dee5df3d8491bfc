"""What a split of a dataset holds.

A source answers two questions for an epoch: how many items lie in each shard along the line (the input of
:mod:`.order`), and what item ``i`` of the shard at place ``j`` is. Both are random access, so neither needs any state.
"""

from __future__ import annotations

__all__ = ["REJECTED", "Line", "SampleSource", "Source"]

import hashlib
import logging
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lightning_llmscale.data.order import Int, derive_key, permute
from lightning_llmscale.data.processing import Processing
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.errors import DataError

log = logging.getLogger(__name__)

REJECTED = object()
"""Returned in place of an item of validation or test that was left out."""

_SHARDS, _REPLACE = 3, 5
_ATTEMPTS = 100


class Line(ABC):
    """The shards of an epoch, in order, and the items they hold.

    Args:
        counts: Items of each shard along the line.
        shards: Number of the shard at each place.
    """

    def __init__(self, counts: Int, shards: Int) -> None:
        self.counts, self.shards = counts, shards

    @abstractmethod
    def read(self, place: int, item: int) -> Any:
        """Return an item of the shard at a place of the line; place -1 is what the remainder of the epoch fills."""

    def read_many(self, places: Int, items: Int) -> list[Any]:
        """Return items as :meth:`read` does."""
        return [self.read(*at) for at in zip(places.tolist(), items.tolist(), strict=True)]


class Source(ABC):
    """The items of a list of shards.

    Args:
        reader: The shards.
        seed: Seed of the order of shards and documents.

    Attributes:
        items: Items in one epoch.
        samples: Samples in each shard.
        item_weight: What an item counts in a mean of losses.
        remainder: The same of what is left over when an epoch is cut into items; 0 for nothing.
        processing: Steps applied to samples, where there are any.
    """

    items: int
    item_weight: int = 1
    remainder: int = 0
    processing: Processing | None = None

    def __init__(self, reader: ShardReader, seed: int) -> None:
        self.reader, self.seed = reader, seed
        self.shards = reader.shards
        if reader.fetches:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(reader.index, range(len(self.shards))))
        self.samples = np.array([self._measure(number) for number in range(len(self.shards))], np.int64)
        if reader.damages:
            log.warning("%d damaged shards are read in part:\n  %s", len(reader.damages), "\n  ".join(reader.damages))

    def _measure(self, shard: int) -> int:
        return len(self.reader.index(shard))

    @abstractmethod
    def line(self, epoch: int | None) -> Line:
        """Lay out an epoch; ``None`` gives the stored order."""

    def shard_order(self, epoch: int | None) -> Int:
        """Shard numbers along the line."""
        stored = np.arange(len(self.shards))
        return stored if epoch is None else permute(stored, len(stored), derive_key(self.seed, epoch, _SHARDS))

    def fingerprint(self) -> dict[str, Any]:
        """Describe the data so that a resumed run can tell whether it is still the same."""
        names = "\n".join(shard.rpartition("/")[2] for shard in self.shards)
        return {
            "shards": len(self.shards),
            "samples": int(self.samples.sum()),
            "names": hashlib.sha256(names.encode()).hexdigest()[:16],
            "counts": hashlib.sha256(self.samples.astype("<i8").tobytes()).hexdigest()[:16],
        }


class SampleSource(Source):
    """One item is one sample of WebDataset's form, processed.

    Args:
        reader: The shards.
        seed: Seed of the order.
        processing: Makes the item of a sample's members.
    """

    def __init__(self, reader: ShardReader, seed: int, processing: Processing | None = None) -> None:
        self.processing = self.process = processing or Processing()
        super().__init__(reader, seed)
        self.items = int(self.samples.sum())

    def line(self, epoch: int | None) -> Line:
        """See :meth:`Source.line`."""
        return _SampleLine(self, epoch)


class _SampleLine(Line):
    def __init__(self, source: SampleSource, epoch: int | None) -> None:
        self._source, self._epoch = source, epoch
        order = source.shard_order(epoch)
        super().__init__(source.samples[order], order)

    def read(self, place: int, item: int) -> Any:
        shard = int(self.shards[place])
        kept, result = self._source.process(self._source.reader.opened(shard), item)
        return result if kept else self._replacement(shard, item)

    def read_many(self, places: Int, items: Int) -> list[Any]:
        process, opened = self._source.process, self._source.reader.opened
        results = []
        for shard, item in zip(self.shards[places].tolist(), items.tolist(), strict=True):
            kept, result = process(opened(shard), item)
            results.append(result if kept else self._replacement(shard, item))
        return results

    def _replacement(self, shard: int, item: int) -> Any:
        """Draw another sample of the shard in place of one that was rejected."""
        source = self._source
        if self._epoch is None:
            return REJECTED
        for attempt in range(1, _ATTEMPTS):
            number = derive_key(source.seed, self._epoch, _REPLACE, shard, item, attempt) % int(source.samples[shard])
            kept, result = source.process(source.reader.opened(shard), number)
            if kept:
                return result
        raise DataError(
            f"{source.shards[shard]}: {_ATTEMPTS} samples in a row were rejected; loosen the filter, or take the shard "
            f"out."
        )
