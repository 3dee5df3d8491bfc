"""A world of ranks in threads of one process: the real sockets and windows, without the cost of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore, Store

from lightning_llmscale.collectives.reducer import Algorithm, Reducer, ReducerOptions, open_reducer

__all__ = ["one_host", "open_everywhere", "run_ranks", "several_hosts", "two_hosts"]

T = TypeVar("T")


def one_host(world_size: int) -> list[str]:
    return ["here"] * world_size


def several_hosts(world_size: int) -> list[str]:
    return [f"host{rank}" for rank in range(world_size)]


def two_hosts(world_size: int) -> list[str]:
    return ["left"] * (world_size // 2) + ["right"] * (world_size - world_size // 2)


def run_ranks(world_size: int, function: Callable[[int], T]) -> list[T | BaseException]:
    """Call ``function(rank)`` in one thread per rank; what each returned or raised, by rank."""
    with ThreadPoolExecutor(world_size) as executor:
        futures = [executor.submit(function, rank) for rank in range(world_size)]
        return [future.exception() or future.result() for future in futures]


def open_everywhere(
    algorithm: Algorithm,
    hosts: Sequence[str],
    *,
    store: Store | None = None,
    peer_timeout: float = 20.0,
    options: ReducerOptions | None = None,
) -> list[Reducer]:
    """One reducer per rank, connected with each other."""
    store = store if store is not None else HashStore()

    def connect(rank: int) -> Reducer:
        return open_reducer(
            algorithm,
            rank=rank,
            world_size=len(hosts),
            store=store,
            hosts=hosts,
            peer_timeout=peer_timeout,
            options=options or ReducerOptions(),
        )

    reducers = []
    for reducer in run_ranks(len(hosts), connect):
        if isinstance(reducer, BaseException):
            raise reducer
        reducers.append(reducer)
    return reducers
