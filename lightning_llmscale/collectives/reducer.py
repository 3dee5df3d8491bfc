"""The one door to gradient reduction: a protocol, and the choice of the algorithm behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor
from torch.distributed import Store

from lightning_llmscale.collectives.chunks import check_flat
from lightning_llmscale.collectives.links import Watch
from lightning_llmscale.collectives.ring import RingReducer
from lightning_llmscale.collectives.shared_memory import SharedMemoryReducer
from lightning_llmscale.collectives.stock import StockReducer
from lightning_llmscale.errors import ConfigurationError

__all__ = ["ALGORITHMS", "Algorithm", "Reducer", "SingleRankReducer", "choose_algorithm", "open_reducer"]

Algorithm = Literal["auto", "stock", "ring", "shared_memory"]
"""How gradients are summed over ranks; see :func:`choose_algorithm` for ``"auto"``."""

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_log = logging.getLogger(__name__)


class Reducer(Protocol):
    """Sums tensors over ranks, one at a time, in the same order on all ranks."""

    def all_reduce(self, flat: Tensor, scale: float) -> None:
        """Replace ``flat`` by ``scale`` times its sum over ranks; all ranks end with identical bits.

        Args:
            flat: Contiguous 1-D CPU tensor of fp32, fp64, fp16 or bf16, of equal length and dtype on all ranks.
            scale: Factor applied once, after the sum.

        Raises:
            ConfigurationError: The tensor cannot be reduced here.
            PeerFailureError: A peer died, left, was silent for too long or reduces something else. The content of
                ``flat`` is then undefined and the reducer cannot be used again.
        """

    def close(self) -> None:
        """Leave the group and free what it holds; safe to repeat, and to call while another thread waits in it."""


class SingleRankReducer:
    """The sum over one rank: scaling alone."""

    def all_reduce(self, flat: Tensor, scale: float) -> None:
        """Replace ``flat`` by ``scale * flat``."""
        check_flat(flat)
        if scale != 1.0:
            flat.detach().mul_(scale)

    def close(self) -> None:
        """Nothing to free."""


def choose_algorithm(algorithm: str, *, world_size: int, hosts: Sequence[str]) -> str:
    """Resolve ``"auto"`` for CPU tensors: shared memory among the ranks of one host, else the ring.

    (Tensors that NCCL serves are the strategy's decision: there the stock all-reduce is the right one.)

    Args:
        algorithm: One of :data:`ALGORITHMS`.
        world_size: Number of ranks.
        hosts: Machine name per rank.

    Returns:
        The algorithm to use, never ``"auto"``.

    Raises:
        ConfigurationError: Unknown algorithm, or ``hosts`` does not match ``world_size``.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(f"Unknown algorithm {algorithm!r}; use one of {', '.join(map(repr, ALGORITHMS))}.")
    if world_size < 1 or len(hosts) != world_size:
        raise ConfigurationError(f"world_size is {world_size} and hosts names {len(hosts)} ranks; they must be equal.")
    if algorithm != "auto":
        return algorithm
    return "shared_memory" if len(set(hosts)) == 1 else "ring"


def open_reducer(
    algorithm: Algorithm,
    *,
    rank: int,
    world_size: int,
    store: Store,
    hosts: Sequence[str],
    peer_timeout: float = 30.0,
    failure: Callable[[], str | None] = lambda: None,
) -> Reducer:
    """Connect all ranks and return their reducer; every rank calls it with the same arguments but ``rank``.

    Args:
        algorithm: One of :data:`ALGORITHMS`. ``"auto"`` takes shared memory on one host, the ring between hosts, and
            falls back from the former to the latter, with a warning, if the system lacks the memory.
        rank: This rank.
        world_size: Number of ranks.
        store: A store that all ranks reach, used while opening only. It may be used again for later reducers.
        hosts: Machine name per rank; ranks with equal names share a host.
        peer_timeout: Seconds of silence after which a peer counts as lost.
        failure: Returns a sentence once a peer is known dead, else ``None``; polled while waiting.

    Raises:
        ConfigurationError: Wrong arguments, or the algorithm cannot work here.
        PeerFailureError: A rank did not show up within ``peer_timeout``.
    """
    chosen = choose_algorithm(algorithm, world_size=world_size, hosts=hosts)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank is {rank} and must be in 0..{world_size - 1}.")
    if peer_timeout <= 0:
        raise ConfigurationError(f"peer_timeout is {peer_timeout} s and must be positive.")
    watch = Watch(rank, peer_timeout, failure)
    if world_size == 1:
        return SingleRankReducer()
    if chosen == "stock":
        return StockReducer(rank=rank, world_size=world_size, watch=watch)
    if chosen == "shared_memory":
        try:
            return SharedMemoryReducer(rank=rank, world_size=world_size, store=store, hosts=hosts, watch=watch)
        except ConfigurationError as error:
            if algorithm != "auto":
                raise
            _log.warning("Falling back from shared memory to the ring: %s", error)
    return RingReducer(rank=rank, world_size=world_size, store=store, hosts=hosts, watch=watch)
