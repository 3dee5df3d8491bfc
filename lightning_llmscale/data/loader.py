"""Sized loaders that give every rank its part of each global batch.

Workers only compute: worker ``w`` of ``W`` builds the rank's batches ``w, w + W, ...`` and torch's DataLoader hands
them out in order, so neither the number of workers nor that of ranks changes what a global batch holds.
"""

from __future__ import annotations

__all__ = ["BatchLoader", "Cursor", "EvaluationLoader", "Layout", "TrainLoader"]

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_llmscale.data.order import Int, derive_key
from lightning_llmscale.data.plan import EpochEnd, Plan, Spans, evaluation_spans, pass_spans
from lightning_llmscale.data.prefetch import Prefetcher
from lightning_llmscale.data.processing import BadSamples
from lightning_llmscale.data.sources import REJECTED
from lightning_llmscale.errors import DataError, LlmscaleError

_PLANNED_AT_ONCE = 4096  # items whose addresses a worker computes together

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Layout:
    """How items are dealt to ranks, workers and batches."""

    global_batch_size: int
    """Items in one batch over all ranks."""
    rank: int = 0
    """Rank among the data replicas."""
    world_size: int = 1
    """Number of data replicas."""
    num_workers: int = 0
    """DataLoader workers of each rank."""
    prefetch_factor: int = 2
    """Batches each worker holds ready."""
    pin_memory: bool = False
    """Whether batches are copied to page-locked memory."""
    max_bad: int = 0
    """Bad samples that a rank may skip in a pass."""

    def edges(self, size: int) -> list[int]:
        """Where the parts of the ranks begin and end in a batch of ``size``; parts differ by one item at most."""
        return [rank * size // self.world_size for rank in range(self.world_size + 1)]


@dataclass
class Cursor:
    """Where training stands; advanced as the loader hands out batches, moved when a checkpoint is loaded."""

    position: int = 0
    """Position of the next item."""
    batch: int = 0
    """Lightning's index of the next batch in this pass."""
    started: bool = False
    """Whether a pass has begun in this process."""


class BatchLoader(ABC):
    """Base of what Lightning iterates. It has a length and, on purpose, no ``state_dict``.

    Lightning never loads a loader's own state when ``estimated_stepping_batches`` was read, and otherwise saves that of
    rank 0 alone; the position therefore lives in the DataModule.

    Args:
        plan: Items by position.
        layout: Ranks, workers and batch size.
        collate: Makes a batch of a list of items.
    """

    llmscale_synchronized = True
    """Each rank gets its own part and equally many batches: strategies neither shard nor wrap this loader."""

    def __init__(self, plan: Plan, layout: Layout, collate: Collate) -> None:
        self.plan, self.layout, self._collate = plan, layout, collate

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def _batches(self, spans: Spans) -> Iterator[Any]:
        workers = min(self.layout.num_workers, len(spans))
        stream = _BatchStream(self.plan, self.layout, spans, self._collate)
        batches: Iterable[Any] = stream
        if workers or self.layout.pin_memory:
            batches = DataLoader(
                stream,
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=self.layout.prefetch_factor if workers else None,
                pin_memory=self.layout.pin_memory,
                # its own seed: torch would draw one from the generator that dropout uses
                generator=torch.Generator().manual_seed(derive_key(spans.start, self.layout.rank) >> 1),
            )
        bad = BadSamples(self.layout.max_bad)
        for batch, problems, error in batches:
            bad.add(problems)
            if error is not None:
                raise error
            yield batch
        bad.summarise()


class TrainLoader(BatchLoader):
    """Loader of training batches that moves a cursor.

    Args:
        plan: Items by position.
        layout: Ranks, workers and batch size.
        collate: Makes a batch of a list of items.
        end: What becomes of items that do not fill a batch.
        cursor: Where to begin; moved with each batch handed out.
    """

    def __init__(self, plan: Plan, layout: Layout, collate: Collate, end: EpochEnd, cursor: Cursor) -> None:
        super().__init__(plan, layout, collate)
        self._end, self._cursor = end, cursor
        self._length = len(pass_spans(plan.items, layout.global_batch_size, end))
        self._spans, self._first = self._rest(), cursor.batch

    @property
    def first_batch(self) -> int:
        """Lightning's index of the batch with which this process entered the pass."""
        return self._first

    def __len__(self) -> int:
        return self._length

    def _rest(self) -> Spans:
        """Batches from the cursor to the end of the pass."""
        cursor, end = self._cursor, self._end
        spans = pass_spans(self.plan.items, self.layout.global_batch_size, end, cursor.position)
        if end == "continuous":
            return Spans(spans.start, spans.size, self._length - cursor.batch)
        cursor.batch = self._length - len(spans)
        return spans

    def next_pass(self) -> int:
        """Position at which the pass after the present one begins."""
        if self._end == "continuous":
            return self._cursor.position
        return self._spans.start // self.plan.items * self.plan.items + self.plan.items

    def position_of(self, batch: int) -> int:
        """Position of a batch of the present pass; of the next pass from the end on."""
        index = batch - self._first
        return self._spans[index][0] if index < len(self._spans) else self.next_pass()

    def rank_weights(self, batch_index: int) -> list[int]:
        """What each rank's part of a batch counts in the mean of losses: its number of items, as a rule.

        Args:
            batch_index: Lightning's index of the batch in this pass.
        """
        start, size = self._spans[batch_index - self._first]
        edges = self.layout.edges(size)
        if size == self.layout.global_batch_size and (start + size) % self.plan.items:
            return [high - low for low, high in pairwise(edges)]
        weights = self.plan.weights(self.plan.deal(start, size))
        return [int(weights[low:high].sum()) for low, high in pairwise(edges)]

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        if cursor.started:  # Lightning asks for the next pass
            cursor.position, cursor.batch = self.next_pass(), 0
        cursor.started = True
        self._spans = self._rest()
        self._first = cursor.batch
        for batch in self._batches(self._spans):
            start, size = self._spans[cursor.batch - self._first]
            cursor.position, cursor.batch = start + size, cursor.batch + 1
            yield batch


class EvaluationLoader(BatchLoader):
    """Loader that reads every item once, in stored order.

    Args:
        plan: Items by position.
        layout: Ranks, workers and batch size.
        collate: Makes a batch of a list of items.
    """

    def __init__(self, plan: Plan, layout: Layout, collate: Collate) -> None:
        super().__init__(plan, layout, collate)
        self._spans = evaluation_spans(plan.items, layout.global_batch_size, layout.world_size)

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._spans)


class _BatchStream(IterableDataset[Any]):
    """The batches of one rank that one worker builds."""

    def __init__(self, plan: Plan, layout: Layout, spans: Spans, collate: Collate) -> None:
        self._plan, self._layout, self._spans, self._collate = plan, layout, spans, collate

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = range(worker.id, len(self._spans), worker.num_workers) if worker else range(len(self._spans))
        with Prefetcher(self._plan) as prefetcher:
            try:
                for addresses in prefetcher.ahead(self._planned(mine)):
                    yield from ((self._build(rows), self._plan.take_problems(), None) for rows in addresses)
            except LlmscaleError as error:
                # handed over as a value: torch would wrap an exception of a worker in its traceback
                yield None, self._plan.take_problems(), error

    def _build(self, addresses: Int) -> Any:
        items = [item for item in self._plan.read(addresses) if item is not REJECTED]
        if not items:
            raise DataError(
                f"All {len(addresses)} samples of a rank's evaluation batch were rejected; use a larger "
                f"global_batch_size, or filter the data when it is packed."
            )
        return self._collate(items)

    def _planned(self, mine: Sequence[int]) -> Iterator[list[Int]]:
        """Addresses of the rank's items of each batch; as many batches as are located in one call."""
        at, count = 0, 1
        while at < len(mine):
            chunk = [self._part(*self._spans[number]) for number in mine[at : at + count]]
            edges = np.cumsum([len(positions) for positions in chunk])
            yield np.split(self._plan.locate(np.concatenate(chunk)), edges[:-1])
            at, count = at + count, max(1, min(count * 4, _PLANNED_AT_ONCE // len(chunk[0])))

    def _part(self, start: int, size: int) -> Int:
        """Positions of this rank; a rank for which nothing is left repeats an item that weighs nothing."""
        edges, positions = self._layout.edges(size), self._plan.deal(start, size)
        low, high = edges[self._layout.rank], edges[self._layout.rank + 1]
        return positions[low:high] if high > low else positions[:1]


def _unchanged(batch: Any) -> Any:
    return batch
