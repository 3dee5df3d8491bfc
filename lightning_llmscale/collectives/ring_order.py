"""In which order to connect a ring: so that the slowest link it uses is as fast as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_llmscale.errors import ConfigurationError

__all__ = ["best_ring_order", "check_ring_order", "ring_bottleneck"]

_EXHAUSTIVE_UP_TO = 8


def check_ring_order(order: Sequence[int], members: Sequence[int]) -> None:
    """Accept an order that names each member once.

    Raises:
        ConfigurationError: It does not.
    """
    if sorted(order) != sorted(members):
        raise ConfigurationError(
            f"ring_order is {list(order)} and must name each of the ranks {list(members)} once; or use 'auto'."
        )


def ring_bottleneck(order: Sequence[int], bandwidth: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What limits a ring: its slowest link, then the sum of times per byte over all its links.

    Args:
        order: Ranks in ring order; each sends to the next, the last to the first.
        bandwidth: Bytes per second from rank ``i`` to rank ``j`` in ``bandwidth[i][j]``.

    Returns:
        The least bandwidth, and minus the sum of ``1 / bandwidth``: the greater pair is the better ring.
    """
    links = [bandwidth[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    return min(links), -sum(1 / link for link in links)


def best_ring_order(bandwidth: Sequence[Sequence[float]]) -> list[int]:
    """The ring whose slowest link is fastest, and among those the one with the least total time per byte.

    All orders are tried for up to 8 ranks; beyond, the ring grows from rank 0 by the fastest link to a rank not yet in
    it and is then improved by reversing stretches of it (2-opt) until no reversal helps.

    Args:
        bandwidth: Square matrix of bytes per second between ranks, positive off the diagonal.

    Returns:
        Ranks in ring order, beginning with 0.
    """
    size = len(bandwidth)
    if size <= _EXHAUSTIVE_UP_TO:
        orders = ([0, *rest] for rest in itertools.permutations(range(1, size)))
        return max(orders, key=lambda order: ring_bottleneck(order, bandwidth))
    order = [0]
    while len(order) < size:
        left = [rank for rank in range(size) if rank not in order]
        order.append(max(left, key=lambda rank: bandwidth[order[-1]][rank]))
    improved = True
    while improved:
        improved = False
        for begin, end in itertools.combinations(range(1, size + 1), 2):
            other = order[:begin] + order[begin:end][::-1] + order[end:]
            if ring_bottleneck(other, bandwidth) > ring_bottleneck(order, bandwidth):
                order, improved = other, True
    return order
