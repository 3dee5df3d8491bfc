"""Bring the shards that will be needed next into the cache while earlier ones are read."""

from __future__ import annotations

__all__ = ["Prefetcher"]

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from lightning_llmscale.data.order import Int
from lightning_llmscale.data.plan import Plan
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.errors import LlmscaleError

_TRANSFERS = 4


class Prefetcher:
    """Fetches shards in threads, in the order in which they are needed; without remote shards it does nothing.

    Args:
        plan: Tells which shards hold which items.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[tuple[int, int], Future[None]] = {}

    def ahead(self, chunks: Iterator[list[Int]]) -> Iterator[list[Int]]:
        """Hand chunks of batches on, each after the shards of the next chunk were asked for."""
        held: list[Int] | None = None
        for chunk in chunks:
            self._ask(self._plan.shards_of(np.concatenate(chunk)))
            if held is not None:
                yield held
            held = chunk
        if held is not None:
            yield held

    def _ask(self, shards: list[tuple[ShardReader, int]]) -> None:
        self._asked = {key: future for key, future in self._asked.items() if not future.done()}
        for reader, shard in shards:
            if (id(reader), shard) not in self._asked:
                self._pool = self._pool or ThreadPoolExecutor(_TRANSFERS, "prefetch")
                self._asked[id(reader), shard] = self._pool.submit(_fetch, reader, shard)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _fetch(reader: ShardReader, shard: int) -> None:
    try:
        reader.fetch(shard)
    except LlmscaleError:
        return  # the reader meets the same failure when it needs the shard, and reports it there
