"""Sized loaders that give every rank its part of each global batch.

Workers only compute: worker ``w`` of ``W`` builds the rank's batches ``w, w + W, ...`` and torch's DataLoader hands
them out in order, so neither the number of workers nor that of ranks changes what a global batch holds.
"""

from __future__ import annotations

__all__ = ["BatchLoader", "Cursor", "Layout", "evaluation_sizes"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lightning_llmscale.data.order import EpochOrder, Int, Order, SequentialOrder, batch_positions, derive_key
from lightning_llmscale.data.sources import Line, Source
from lightning_llmscale.errors import DataError, LlmscaleError

_PLANNED_AT_ONCE = 4096  # samples whose places a worker computes together


@dataclass(frozen=True)
class Layout:
    """How samples are dealt to ranks, workers and batches."""

    global_batch_size: int
    """Samples in one batch over all ranks."""
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
    lanes: int = 1
    """Lanes of the shuffle."""
    window: int = 4
    """Shards open in a lane."""

    def parts(self, size: int) -> list[int]:
        """Samples of each rank in a batch of ``size``."""
        edges = [rank * size // self.world_size for rank in range(self.world_size + 1)]
        return [high - low for low, high in pairwise(edges)]


@dataclass
class Cursor:
    """Where training stands; advanced as the loader hands out batches, moved when a checkpoint is loaded."""

    epoch: int = 0
    """Epoch of the next batch."""
    position: int = 0
    """Samples of the epoch already handed out."""
    batch: int = 0
    """Lightning's index of the next batch in this epoch."""
    started: bool = False
    """Whether a pass over the epoch has begun in this process."""


class BatchLoader:
    """Base of what Lightning iterates. It has a length and, on purpose, no ``state_dict``.

    Lightning never loads a loader's own state when ``estimated_stepping_batches`` was read, and otherwise saves that of
    rank 0 alone; the position therefore lives in the DataModule.

    Args:
        source: Items.
        layout: Ranks, workers and batch size.
        sizes: Samples of each global batch of a whole pass.
        cursor: Shuffled training when given, which then moves with the batches; the stored order otherwise.
        collate: Makes a batch of a list of items.
    """

    llmscale_synchronized = True
    """Each rank gets its own part and equally many batches: strategies neither shard nor wrap this loader."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        sizes: Sequence[int],
        cursor: Cursor | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._source, self._layout, self._sizes = source, layout, sizes
        self._cursor, self._collate = cursor, collate

    def __len__(self) -> int:
        return len(self._sizes)

    def rank_weights(self, batch_index: int) -> list[int]:
        """Samples of each rank in a batch, for the weighted mean of losses."""
        return self._layout.parts(self._sizes[batch_index])

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor or Cursor()
        if cursor.started:  # Lightning asks for the next pass
            cursor.epoch, cursor.position, cursor.batch = cursor.epoch + 1, 0, 0
        cursor.started = True
        spans, position = [], cursor.position
        for size in self._sizes[cursor.batch :]:
            spans.append((position, size))
            position += size
        stream = _BatchStream(self._source, self._layout, spans, cursor.epoch if self._cursor else None, self._collate)
        workers = min(self._layout.num_workers, len(spans))
        batches = DataLoader(
            stream,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            prefetch_factor=self._layout.prefetch_factor if workers else None,
            pin_memory=self._layout.pin_memory,
        )
        for (start, size), batch in zip(spans, batches, strict=True):
            if isinstance(batch, _Failure):
                raise batch.error
            cursor.position, cursor.batch = start + size, cursor.batch + 1
            yield batch


def evaluation_sizes(items: int, global_batch_size: int, world_size: int) -> list[int]:
    """Sizes of batches that hold every item once and give each rank at least one of every batch.

    Only the end differs from full batches: a last batch of fewer items than ranks borrows from the one before or
    joins it.
    """
    sizes = [global_batch_size] * (items // global_batch_size)
    rest = items % global_batch_size
    if rest >= world_size or (rest and not sizes):
        sizes.append(rest)
    elif rest and global_batch_size - (world_size - rest) >= world_size:
        sizes[-1] -= world_size - rest
        sizes.append(world_size)
    elif rest:
        sizes[-1] += rest
    return sizes


class _BatchStream(IterableDataset[Any]):
    """The batches of one rank that one worker builds, from a given place on."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        spans: Sequence[tuple[int, int]],
        epoch: int | None,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._source, self._layout, self._spans = source, layout, spans
        self._epoch, self._collate = epoch, collate

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self._spans[worker.id :: worker.num_workers] if worker else self._spans
        try:
            line = self._source.line(self._epoch)
            order = self._order(line)
            for places, items in self._planned(order, mine):
                yield self._collate([line.read(*at) for at in zip(places.tolist(), items.tolist(), strict=True)])
        except LlmscaleError as error:
            # handed over as a value: torch would wrap an exception of a worker in its traceback
            yield _Failure(error)

    def _order(self, line: Line) -> Order:
        if self._epoch is None:
            return SequentialOrder(line.counts)
        key = derive_key(self._source.seed, self._epoch)
        return EpochOrder(line.counts, key, self._layout.lanes, self._layout.window)

    def _planned(self, order: Order, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[Int, Int]]:
        """Place and item of each sample of each batch; many batches are located in one call."""
        layout, at, count = self._layout, 0, 1
        while at < len(spans):
            chunk = [
                batch_positions(start, size, order.lanes, layout.rank, layout.world_size)
                for start, size in spans[at : at + count]
            ]
            edges = np.cumsum([len(positions) for positions in chunk])
            places, items = order.locate(np.concatenate(chunk))
            yield from zip(np.split(places, edges[:-1]), np.split(items, edges[:-1]), strict=True)
            at, count = at + count, max(1, min(count * 4, _PLANNED_AT_ONCE // max(1, len(chunk[0]))))


@dataclass(frozen=True)
class _Failure:
    error: LlmscaleError


def _unchanged(batch: Any) -> Any:
    return batch


def collate_samples(samples: list[dict[str, Any]]) -> Any:
    """Stack samples as torch's ``default_collate`` does.

    Raises:
        DataError: Samples have different extensions, or values that cannot be stacked.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        first = samples[0]
        raise DataError(
            f"The {len(samples)} samples of a batch cannot be stacked ({str(error).splitlines()[0]}; the first is "
            f"{first['__key__']!r} of {first['__url__']} with {sorted(first)}); give the DataModule a collate function."
        ) from error
