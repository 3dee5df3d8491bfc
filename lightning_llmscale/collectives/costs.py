"""What each algorithm would cost on measured links, and which to take: pure functions.

The model is the usual one of latency and bandwidth: a message of ``b`` bytes from ``i`` to ``j`` takes
``latency[i][j] + b / bandwidth[i][j]``; a rank sends to one peer at a time; additions and encoding are free. (For rings
see Patarasuk and Yuan, 2009; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005, for the others.) It is there to rank algorithms, not to predict a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_llmscale.collectives.probe import LinkSpeeds
from lightning_llmscale.collectives.ring_order import best_ring_order
from lightning_llmscale.collectives.two_level import islands_of_hosts

__all__ = [
    "WIRE_FRACTIONS",
    "Choice",
    "choose_by_cost",
    "cost_direct",
    "cost_ring",
    "cost_two_level",
    "islands_of_links",
]

WIRE_FRACTIONS: Mapping[str, float] = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254}
"""Bytes on the wire per byte of fp32."""

_MARKED = 3.0  # links within this factor of each other make no islands


@dataclass(frozen=True)
class Choice:
    """An algorithm with its layout, and what it and its rivals would cost."""

    algorithm: str
    seconds: Mapping[str, float]
    """Of one all-reduce, by algorithm."""

    ring_order: Sequence[int] | None = None
    """Positions in ring order, for the ring."""

    islands: Sequence[Sequence[int]] | None = None
    """Positions near each other, for two levels."""


def cost_ring(size: int, speeds: LinkSpeeds, order: Sequence[int]) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes: ``2 (n - 1)`` steps of ``size / n`` over the slowest link."""
    links = list(zip(order, [*order[1:], order[0]], strict=True))
    steps = 2 * (len(order) - 1)
    slowest = min(speeds.bandwidth[a][b] for a, b in links)
    return steps * (size / len(order) / slowest + max(speeds.latency[a][b] for a, b in links))


def cost_direct(size: float, speeds: LinkSpeeds, members: Sequence[int]) -> float:
    """Seconds of a direct all-reduce: every member sends ``size / n`` to each other one, twice."""
    part = size / len(members)
    per_rank = [sum(part / speeds.bandwidth[a][b] for b in members if b != a) for a in members]
    return 2 * (max(per_rank) + max(speeds.latency[a][b] for a in members for b in members))


def cost_two_level(size: float, speeds: LinkSpeeds, islands: Sequence[Sequence[int]], wire: str = "fp32") -> float:
    """Seconds of a two-level all-reduce: the slower of its levels, which overlap, and the first piece of the other."""
    inside = max(cost_direct(size, speeds, island) for island in islands)
    part = size / len(islands[0]) * WIRE_FRACTIONS[wire]
    across = max(cost_direct(part, speeds, owners) for owners in zip(*islands, strict=True))
    piece = min(1.0, (2 << 20) / size)
    return max(inside, across) + piece * min(inside, across)


def islands_of_links(bandwidth: Sequence[Sequence[float]]) -> list[list[int]]:
    """Ranks that faster links join: the connected parts once links slower than the middle are cut.

    Args:
        bandwidth: Bytes per second between ranks.

    Returns:
        At least two islands of equal size, at least two; none if the links differ by less than a factor of 3 or do not
        fall into such islands.
    """
    size = len(bandwidth)
    links = [bandwidth[a][b] for a in range(size) for b in range(size) if a != b]
    if max(links) < _MARKED * min(links):
        return []
    middle = (max(links) * min(links)) ** 0.5
    islands: list[list[int]] = []
    left = set(range(size))
    while left:
        island = [min(left)]
        for rank in island:  # grows while it is walked
            left.discard(rank)
            island += [other for other in left if bandwidth[rank][other] >= middle and other not in island]
        left -= set(island)
        islands.append(sorted(island))
    even = len(islands) > 1 and {len(island) for island in islands} == {len(islands[0])} and len(islands[0]) > 1
    return islands if even else []


def choose_by_cost(size: int, speeds: LinkSpeeds, hosts: Sequence[str], wire: str = "fp32") -> Choice:
    """The cheapest algorithm between hosts.

    Args:
        size: Bytes of a typical tensor.
        speeds: What :func:`measure_links` found.
        hosts: Machine name per position.
        wire: Format of gradients on the wire; a lossy one rules the ring out.
    """
    everyone = range(len(hosts))
    by_host = islands_of_hosts(hosts)
    even = len(by_host) > 1 and {len(island) for island in by_host} == {len(by_host[0])} and len(by_host[0]) > 1
    islands = by_host if even else islands_of_links(speeds.bandwidth)
    seconds = {"direct": cost_direct(size * WIRE_FRACTIONS[wire], speeds, everyone)}
    order = best_ring_order(speeds.bandwidth)
    if wire == "fp32":
        seconds["ring"] = cost_ring(size, speeds, order)
    if islands:
        seconds["two_level"] = cost_two_level(size, speeds, islands, wire)
    best = min(seconds, key=lambda algorithm: seconds[algorithm])
    return Choice(
        best, seconds, ring_order=order if best == "ring" else None, islands=islands if best == "two_level" else None
    )
