"""The one door to gradient reduction: which algorithm fits, and opening it on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor
from torch.distributed import Store

from lightning_llmscale.collectives.chunks import check_flat
from lightning_llmscale.collectives.codecs import Wire, make_codec
from lightning_llmscale.collectives.costs import choose_by_cost
from lightning_llmscale.collectives.direct import DirectReducer
from lightning_llmscale.collectives.links import Watch
from lightning_llmscale.collectives.probe import measure_links
from lightning_llmscale.collectives.protocol import Group, Reducer
from lightning_llmscale.collectives.ring import RingReducer
from lightning_llmscale.collectives.ring_order import best_ring_order, check_ring_order
from lightning_llmscale.collectives.shared_memory import SharedMemoryReducer
from lightning_llmscale.collectives.stock import StockReducer
from lightning_llmscale.collectives.two_level import islands_of_hosts, open_two_level
from lightning_llmscale.errors import ConfigurationError

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Reducer",
    "ReducerOptions",
    "SingleRankReducer",
    "choose_algorithm",
    "open_reducer",
]

Algorithm = Literal["auto", "stock", "ring", "direct", "two_level", "shared_memory"]
"""How gradients are summed over ranks; see :func:`choose_algorithm` for ``"auto"``."""

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_TYPICAL_BYTES = 25 << 20  # DDP's default bucket

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How to reduce, beyond the algorithm; each option is refused where it could take no effect."""

    wire: Wire = "fp32"
    """Format of gradients between hosts: as they are, ``"bf16"`` or ``"int8"`` blocks. For ``"direct"``,
    ``"two_level"``."""

    error_feedback: bool | None = None
    """Add what the wire drops to the next gradient; ``None`` does so for ``"int8"``."""

    ring_order: Sequence[int] | Literal["auto"] | None = None
    """Ranks in the order of the ring; ``"auto"`` measures all links first; ``None`` is rank order. For ``"ring"``."""

    segment_bytes: int | None = None
    """Size of the pieces that travel while others are added; ``None``: 512 KiB (ring), 256 KiB (direct)."""

    deterministic: bool = False
    """Sum in rank order whatever the topology, so that any two layouts of the same ranks give the same bits."""

    islands: Sequence[Sequence[int]] | None = None
    """Ranks near each other, for ``"two_level"``; ``None``: those that share a host."""

    @property
    def leaves_layout_open(self) -> bool:
        """Whether measured links may decide: no option already implies an algorithm."""
        given = (self.ring_order, self.islands, self.segment_bytes)
        return not self.deterministic and all(option is None for option in given)

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback is on."""
        return self.wire == "int8" if self.error_feedback is None else self.error_feedback


_DEFAULTS = ReducerOptions()


class SingleRankReducer:
    """The sum over one rank: scaling alone."""

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale * flat``; ``stream`` is of no account."""
        check_flat(flat)
        if scale != 1.0:
            flat.detach().mul_(scale)

    def close(self, reason: str | None = None) -> None:
        """Nothing to free, nobody to tell."""


def choose_algorithm(
    algorithm: str, *, world_size: int, hosts: Sequence[str], options: ReducerOptions = _DEFAULTS
) -> str:
    """Resolve ``"auto"`` for CPU tensors as far as that is possible without measuring; refuse options without effect.

    ``"auto"`` takes what the options imply (a lossy wire or ``deterministic``: direct; an order: the ring; islands:
    two-level); else shared memory among the ranks of one host, two-level where each of several hosts holds equally many
    ranks, at least two, and the ring in all other cases; between hosts :func:`open_reducer` then measures the links and
    may think better of it. (Tensors that NCCL serves are the strategy's decision: there the stock all-reduce is the
    right one.)

    Args:
        algorithm: One of :data:`ALGORITHMS`.
        world_size: Number of ranks.
        hosts: Machine name per rank.
        options: The other options.

    Returns:
        The algorithm to use, never ``"auto"``.

    Raises:
        ConfigurationError: Unknown algorithm, an option that cannot take effect, or ``hosts`` of another length.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(f"Unknown algorithm {algorithm!r}; use one of {', '.join(map(repr, ALGORITHMS))}.")
    if world_size < 1 or len(hosts) != world_size:
        raise ConfigurationError(f"world_size is {world_size} and hosts names {len(hosts)} ranks; they must be equal.")
    make_codec(options.wire)
    chosen = _resolve(hosts, options) if algorithm == "auto" else algorithm
    if options.error_feedback and options.wire == "fp32":
        raise ConfigurationError("error_feedback has no effect on wire='fp32', which drops nothing; leave it out.")
    only = {
        f"wire={options.wire!r}": (options.wire != "fp32", ("direct", "two_level")),
        "ring_order": (options.ring_order is not None, ("ring",)),
        "segment_bytes": (options.segment_bytes is not None, ("ring", "direct")),
        "deterministic=True": (options.deterministic, ("direct", "shared_memory")),
        "islands": (options.islands is not None, ("two_level",)),
    }
    for option, (given, algorithms) in only.items():
        if given and chosen not in algorithms:
            names = " or ".join(map(repr, algorithms))
            raise ConfigurationError(f"{option} has no effect with algorithm={chosen!r}; use algorithm={names}.")
    if options.segment_bytes is not None and (options.segment_bytes < 1024 or options.segment_bytes % 1024):
        raise ConfigurationError(f"segment_bytes is {options.segment_bytes} and must be a positive multiple of 1024.")
    return chosen


def _resolve(hosts: Sequence[str], options: ReducerOptions) -> str:
    islands = islands_of_hosts(hosts)
    even = len(islands) > 1 and {len(island) for island in islands} == {len(islands[0])} and len(islands[0]) > 1
    if options.islands is not None:
        return "two_level"
    if options.ring_order is not None:
        return "ring"
    if len(islands) == 1 and options.wire == "fp32" and options.segment_bytes is None:
        return "shared_memory"
    if options.deterministic:
        return "direct"
    if even and options.segment_bytes is None:
        return "two_level"
    return "direct" if options.wire != "fp32" else "ring"


def open_reducer(
    algorithm: Algorithm,
    *,
    rank: int,
    world_size: int,
    store: Store,
    hosts: Sequence[str],
    peer_timeout: float = 30.0,
    failure: Callable[[], str | None] = lambda: None,
    options: ReducerOptions = _DEFAULTS,
    members: Sequence[int] | None = None,
) -> Reducer:
    """Connect ranks and return their reducer; each of them calls it with the same arguments but ``rank``.

    After a loss the survivors close their broken reducers, agree on who is left, and call this again with ``members``:
    that takes milliseconds, no process restarts, and messages keep naming ranks as before.

    Args:
        algorithm: One of :data:`ALGORITHMS`. ``"auto"`` takes what :func:`choose_algorithm` says; between hosts, where
        no
            option implies an algorithm, it measures all links and takes the cheapest by the cost model, and logs why.
            Where the system lacks the shared memory, it falls back to the ring with a warning.
        rank: This rank.
        world_size: Number of ranks.
        store: A store that all ranks reach, used while opening only. It may be used again for later reducers.
        hosts: Machine name per rank; ranks with equal names share a host.
        peer_timeout: Seconds of silence after which a peer counts as lost.
        failure: Returns a sentence once a peer is known dead, else ``None``; polled while waiting.
        options: The other options.
        members: The ranks that take part, this one among them; by default all.

    Raises:
        ConfigurationError: Wrong arguments, or the algorithm cannot work here.
        PeerFailureError: A rank did not show up within ``peer_timeout``.
    """
    if len(hosts) != world_size:
        raise ConfigurationError(f"world_size is {world_size} and hosts names {len(hosts)} ranks; they must be equal.")
    members = tuple(range(world_size)) if members is None else tuple(members)
    if not 0 <= rank < world_size or rank not in members or not set(members) <= set(range(world_size)):
        raise ConfigurationError(f"rank is {rank} and must be one of {list(members)}, all in 0..{world_size - 1}.")
    near = [hosts[member] for member in members]
    chosen = choose_algorithm(algorithm, world_size=len(members), hosts=near, options=options)
    if peer_timeout <= 0:
        raise ConfigurationError(f"peer_timeout is {peer_timeout} s and must be positive.")
    if len(members) == 1:
        return SingleRankReducer()
    group = Group(members, tuple(near), store, Watch(rank, peer_timeout, failure))
    if algorithm == "auto" and len(set(near)) > 1 and options.leaves_layout_open:
        chosen, options = _measured_choice(group, options)
    if chosen == "shared_memory":
        try:
            return SharedMemoryReducer(group)
        except ConfigurationError as error:
            if algorithm != "auto":
                raise
            _log.warning("Falling back from shared memory to the ring: %s", error)
            chosen = "direct" if options.deterministic else "ring"
    return _open(chosen, group, options)


def _measured_choice(group: Group, options: ReducerOptions) -> tuple[str, ReducerOptions]:
    """Measure all links, choose by the cost model, and say so."""
    speeds = measure_links(group)
    choice = choose_by_cost(_TYPICAL_BYTES, speeds, group.hosts, options.wire)
    links = [bandwidth for row in speeds.bandwidth for bandwidth in row if bandwidth]
    costs = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in sorted(choice.seconds.items()))
    if group.position == 0:
        _log.info(
            "Chose algorithm %r for %d ranks on %d hosts with links of %.1f to %.1f MB/s and up to %.2f ms: "
            "25 MiB would take %s.",
            choice.algorithm,
            group.size,
            len(set(group.hosts)),
            min(links) / 1e6,
            max(links) / 1e6,
            1e3 * max(map(max, speeds.latency)),
            costs,
        )
    order = None if choice.ring_order is None else [group.members[position] for position in choice.ring_order]
    return choice.algorithm, replace(options, ring_order=order, islands=choice.islands)


def _open(chosen: str, group: Group, options: ReducerOptions) -> Reducer:
    if chosen == "stock":
        return StockReducer(group)
    codec = make_codec(options.wire)
    if chosen == "two_level":
        islands = islands_of_hosts(group.hosts) if options.islands is None else options.islands
        return open_two_level(group, islands, codec=codec, error_feedback=options.feeds_back)
    if chosen == "direct":
        return DirectReducer(
            group,
            codec=codec,
            error_feedback=options.feeds_back,
            segment_bytes=256 << 10 if options.segment_bytes is None else options.segment_bytes,
        )
    order = options.ring_order
    if order == "auto":
        order = [group.members[position] for position in best_ring_order(measure_links(group).bandwidth)]
        _log.info("Ring order by measured bandwidth: %s", order)
    elif order is not None:
        check_ring_order(order, group.members)
    return RingReducer(
        group if order is None else group.subset(order),
        segment_bytes=512 << 10 if options.segment_bytes is None else options.segment_bytes,
    )
