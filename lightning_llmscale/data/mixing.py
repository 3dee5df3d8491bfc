"""Mix datasets by weight: a pure function of the position, like the order of one dataset.

Positions are dealt in blocks of 1,000. In each block a dataset has its share, rounded by largest remainder, at places
drawn by a keyed permutation; its items come in its own shuffled order, one epoch of it after the other. So after any
number of items each dataset was read in proportion to its weight to within a block, and the whole state is the
position.
"""

from __future__ import annotations

__all__ = ["MixedPlan", "Stage", "Stop", "shares"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lightning_llmscale.data.order import Int, derive_key, permute
from lightning_llmscale.data.plan import Plan, ShuffledPlan
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.errors import ConfigurationError

Stop = Literal["first", "all"] | int
"""End of a pass: when the first dataset was read whole, when all were, or after a number of items."""

_BLOCK = 1000
_MIX = 6


def shares(weights: Mapping[str, float]) -> Int:
    """Items of each dataset in a block, by largest remainder.

    Raises:
        ConfigurationError: A weight is not positive, or too small to get one item of a block.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ConfigurationError(
                f"The weight of {name!r} is {weight}; give a positive number, or leave the dataset out."
            )
        if weight < total / _BLOCK:
            raise ConfigurationError(
                f"The weight of {name!r} is {weight} of {total:g}, less than one item in {_BLOCK}; raise it to "
                f"{total / _BLOCK:g}."
            )
    exact = np.array([weight / total * _BLOCK for weight in weights.values()])
    whole = np.floor(exact).astype(np.int64)
    extra = np.argsort(whole - exact, kind="stable")[: _BLOCK - whole.sum()]
    whole[extra] += 1
    return whole


@dataclass
class Stage:
    """A stretch of training with fixed weights."""

    weights: dict[str, float]
    """Weight of each dataset."""
    start: int = 0
    """Position at which the stage began."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Items of each dataset read before."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"weights": self.weights, "start": self.start, "offsets": self.offsets}


class MixedPlan(Plan):
    """Items of several datasets.

    Args:
        plans: The datasets, each shuffled in its own order.
        stage: Weights, by the names in ``plans``.
        seed: Seed of the order.
        stop: End of a pass.
    """

    def __init__(self, plans: Mapping[str, ShuffledPlan], stage: Stage, seed: int, stop: Stop) -> None:
        self._names, self._plans = list(plans), list(plans.values())
        self._stage, self._key = stage, derive_key(seed, _MIX)
        self._shares = shares({name: stage.weights[name] for name in plans})
        self._offsets = np.array([stage.offsets.get(name, 0) for name in plans], np.int64)
        self.items = stop if isinstance(stop, int) else self._pass_length(stop)

    def _pass_length(self, stop: str) -> int:
        """Positions until a dataset was read whole, counted from the start of a stage."""
        ends = []
        for number, plan in enumerate(self._plans):
            block, rest = divmod(plan.items - 1, int(self._shares[number]))
            owner, _ = self._block(np.array([block]))
            ends.append(block * _BLOCK + int(np.flatnonzero(owner[0] == number)[rest]) + 1)
        return min(ends) if stop == "first" else max(ends)

    def _block(self, blocks: Int) -> tuple[Int, Int]:
        """Dataset of each position of some blocks, and the number of its items before in the block; (blocks, 1000)."""
        places = np.tile(np.arange(_BLOCK), (len(blocks), 1))
        keys = np.array([derive_key(self._key, block) for block in blocks.tolist()], np.uint64)
        drawn = permute(places.ravel(), _BLOCK, np.repeat(keys, _BLOCK)).reshape(places.shape)
        owner: Int = np.searchsorted(np.cumsum(self._shares), drawn, "right").astype(np.int64)
        before = np.zeros_like(owner)
        for number in range(len(self._plans)):
            own = owner == number
            before[own] = (np.cumsum(own, axis=1) - 1)[own]
        return owner, before

    def _split(self, positions: Int) -> tuple[Int, Int]:
        """Dataset of each position, and the position in that dataset's own order."""
        block, place = np.divmod(positions - self._stage.start, _BLOCK)
        distinct, row = np.unique(block, return_inverse=True)
        owner, before = self._block(distinct)
        number = owner[row, place]
        own = self._offsets[number] + block * self._shares[number] + before[row, place]
        return number, own.astype(np.int64)

    def read_before(self, position: int) -> dict[str, int]:
        """Items of each dataset before a position, over all stages."""
        block, place = divmod(position - self._stage.start, _BLOCK)
        counts = np.bincount(self._block(np.array([block]))[0][0, :place], minlength=len(self._plans))
        return dict(zip(self._names, (self._offsets + block * self._shares + counts).tolist(), strict=True))

    def deal(self, start: int, size: int) -> Int:
        """See :meth:`Plan.deal`."""
        positions = np.arange(start, start + size, dtype=np.int64)
        number, own = self._split(positions)
        lane = np.zeros_like(positions)
        for dataset, plan in enumerate(self._plans):
            lane[number == dataset] = plan.lane(own[number == dataset])
        return positions[np.lexsort((positions, lane, number))]

    def locate(self, positions: Int) -> Int:
        """See :meth:`Plan.locate`; rows are (dataset, epoch, place, item)."""
        number, own = self._split(positions)
        rows = np.zeros((len(positions), 4), np.int64)
        rows[:, 0] = number
        for dataset in np.unique(number).tolist():
            use = number == dataset
            rows[use, 1:] = self._plans[dataset].locate(own[use])
        return rows

    def read(self, addresses: Int) -> list[Any]:
        """See :meth:`Plan.read`."""
        cuts = np.flatnonzero(np.diff(addresses[:, 0])) + 1
        items: list[Any] = []
        for part in np.split(addresses, cuts):
            items += self._plans[int(part[0, 0])].read(part[:, 1:])
        return items

    def shards_of(self, addresses: Int) -> list[tuple[ShardReader, int]]:
        """See :meth:`Plan.shards_of`."""
        return [
            shard
            for dataset, plan in enumerate(self._plans)
            for shard in plan.shards_of(addresses[addresses[:, 0] == dataset][:, 1:])
        ]

    def take_problems(self) -> list[str]:
        """See :meth:`Plan.take_problems`."""
        return [problem for plan in self._plans for problem in plan.take_problems()]
