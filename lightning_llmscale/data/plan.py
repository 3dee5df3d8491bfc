"""What lies at each position of a run: the stored order, or shuffled epochs one after the other.

Positions count items from the start of the run, so epoch ``e`` of ``N`` items holds ``e * N`` to ``(e + 1) * N - 1``
and a batch may cross from one epoch into the next. A plan is a pure function; processes share nothing but its
arguments.
"""

from __future__ import annotations

__all__ = ["EpochEnd", "Plan", "ShuffledPlan", "Spans", "StoredPlan", "evaluation_spans", "pass_spans"]

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from lightning_llmscale.data.order import EpochOrder, Int, SequentialOrder, derive_key
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.sources import Line, Source

EpochEnd = Literal["drop", "pad", "continuous"]


class Plan(ABC):
    """Items by position.

    Attributes:
        items: Items in an epoch.
    """

    items: int

    @abstractmethod
    def deal(self, start: int, size: int) -> Int:
        """Positions ``start`` to ``start + size``, sorted so that neighbours lie in few shards."""

    @abstractmethod
    def locate(self, positions: Int) -> Int:
        """Addresses of items, one row for each position, for :meth:`read`."""

    @abstractmethod
    def read(self, addresses: Int) -> list[Any]:
        """Return the items at addresses."""

    def shards_of(self, addresses: Int) -> list[tuple[ShardReader, int]]:
        """Shards that come through the cache and are needed for items, in the order of their need."""
        return []

    def take_problems(self) -> list[str]:
        """Return and forget the bad samples that this process met."""
        return []

    def weights(self, positions: Int) -> Int:
        """What the items count in a mean of losses, relative to each other."""
        return np.ones(len(positions), np.int64)


class StoredPlan(Plan):
    """Items as they lie in the shards."""

    def __init__(self, source: Source) -> None:
        self.items, self._source = source.items, source
        self._line = source.line(None)
        self._order = SequentialOrder(self._line.counts)

    def deal(self, start: int, size: int) -> Int:
        """See :meth:`Plan.deal`."""
        return np.arange(start, start + size, dtype=np.int64)

    def locate(self, positions: Int) -> Int:
        """See :meth:`Plan.locate`; rows are (place, item)."""
        return np.stack(self._order.locate(positions), axis=1)

    def read(self, addresses: Int) -> list[Any]:
        """See :meth:`Plan.read`."""
        return self._line.read_many(addresses[:, 0], addresses[:, 1])

    def shards_of(self, addresses: Int) -> list[tuple[ShardReader, int]]:
        """See :meth:`Plan.shards_of`."""
        return _fetched(self._source.reader, self._line, addresses[:, 0])

    def take_problems(self) -> list[str]:
        """See :meth:`Plan.take_problems`."""
        return self._source.processing.take_problems() if self._source.processing else []


class ShuffledPlan(Plan):
    """Epochs in the order of :class:`.order.EpochOrder`.

    Args:
        source: Items.
        lanes: Lanes of the order.
        window: Shards open in a lane.
        remainder: Whether an epoch ends with the sequence that the tokens left over can still fill.
    """

    def __init__(self, source: Source, lanes: int, window: int, remainder: bool = False) -> None:
        self._source, self._window = source, window
        self._lanes = max(1, min(lanes, source.items))
        self.items = source.items + bool(remainder and source.remainder)
        self._epochs: dict[int, tuple[Line, EpochOrder]] = {}

    def deal(self, start: int, size: int) -> Int:
        """See :meth:`Plan.deal`."""
        positions = np.arange(start, start + size, dtype=np.int64)
        return positions[np.argsort(self.lane(positions), kind="stable")]

    def lane(self, positions: Int) -> Int:
        """Lane of each position; those of another epoch are others."""
        epoch, position = np.divmod(positions, self.items)
        return epoch * self._lanes + position % self._lanes

    def locate(self, positions: Int) -> Int:
        """See :meth:`Plan.locate`; rows are (epoch, place, item), place -1 for what the tokens left over fill."""
        epoch, position = np.divmod(positions, self.items)
        rows = np.full((len(positions), 3), -1, np.int64)
        rows[:, 0] = epoch
        for number in np.unique(epoch).tolist():
            use = np.flatnonzero((epoch == number) & (position < self._source.items))
            rows[use, 1], rows[use, 2] = self._epoch(number)[1].locate(position[use])
        return rows

    def read(self, addresses: Int) -> list[Any]:
        """See :meth:`Plan.read`."""
        # positions are dealt epoch by epoch, so the items of an epoch are neighbours
        cuts = np.flatnonzero(np.diff(addresses[:, 0])) + 1
        items: list[Any] = []
        for part in np.split(addresses, cuts):
            items += self._epoch(int(part[0, 0]))[0].read_many(part[:, 1], part[:, 2])
        return items

    def shards_of(self, addresses: Int) -> list[tuple[ShardReader, int]]:
        """See :meth:`Plan.shards_of`."""
        return [
            shard
            for epoch in np.unique(addresses[:, 0]).tolist()
            for shard in _fetched(self._source.reader, self._epoch(epoch)[0], addresses[addresses[:, 0] == epoch][:, 1])
        ]

    def take_problems(self) -> list[str]:
        """See :meth:`Plan.take_problems`."""
        return self._source.processing.take_problems() if self._source.processing else []

    def weights(self, positions: Int) -> Int:
        """See :meth:`Plan.weights`; a sequence counts the tokens it predicts."""
        if self.items == self._source.items:
            return super().weights(positions)
        last = positions % self.items == self._source.items
        return np.where(last, self._source.remainder, self._source.item_weight)

    def _epoch(self, epoch: int) -> tuple[Line, EpochOrder]:
        entry = self._epochs.get(epoch)
        if entry is None:
            line = self._source.line(epoch)
            key = derive_key(self._source.seed, epoch)
            entry = line, EpochOrder(line.counts, key, self._lanes, self._window)
            for old in sorted(self._epochs)[:-1]:  # a batch touches two epochs at most
                del self._epochs[old]
            self._epochs[epoch] = entry
        return entry


def _fetched(reader: ShardReader, line: Line, places: Int) -> list[tuple[ShardReader, int]]:
    if not reader.fetches:
        return []
    distinct, first = np.unique(places, return_index=True)
    return [(reader, int(line.shards[place])) for place in distinct[np.argsort(first)]]


@dataclass(frozen=True)
class Spans(Sequence[tuple[int, int]]):
    """Consecutive batches as (start, size): ``full`` of ``size`` items, then the sizes in ``last``.

    Args:
        start: Position of the first batch.
        size: Items of a full batch.
        full: Number of full batches.
        last: Sizes of further batches.
    """

    start: int
    size: int
    full: int
    last: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.full + len(self.last)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        """Return one batch, or the batches of a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        extra = index - self.full
        if extra < 0:
            return self.start + index * self.size, self.size
        return self.start + self.full * self.size + sum(self.last[:extra]), self.last[extra]


def pass_spans(items: int, size: int, end: EpochEnd, position: int = 0) -> Spans:
    """Batches of the rest of a pass over the training data.

    Args:
        items: Items in an epoch.
        size: Items of a global batch.
        end: ``"drop"`` leaves out what does not fill a batch, ``"pad"`` ends with a smaller batch, ``"continuous"``
            counts as many full batches as an epoch can fill and lets the position run on into the next epoch.
        position: Position of the first batch.
    """
    rest = items if end == "continuous" else items - position % items
    last = (rest % size,) if end == "pad" and rest % size else ()
    return Spans(position, size, rest // size, last)


def evaluation_spans(items: int, size: int, world_size: int) -> Spans:
    """Batches that hold every item once and give each rank at least one of every batch.

    Only the end differs from full batches: a last batch of fewer items than ranks borrows from the one before or
    joins it.
    """
    count, rest = divmod(items, size)
    if not rest:
        return Spans(0, size, count)
    if rest >= world_size or not count:
        return Spans(0, size, count, (rest,))
    borrowed = world_size - rest
    if size - borrowed >= world_size:
        return Spans(0, size, count - 1, (size - borrowed, world_size))
    return Spans(0, size, count - 1, (size + rest,))
