"""The cost model against its own closed formulas and against what is known to be best in plain cases."""

from __future__ import annotations

import pytest

from lightning_llmscale.collectives.costs import (
    choose_by_cost,
    cost_direct,
    cost_ring,
    cost_two_level,
    islands_of_links,
)
from lightning_llmscale.collectives.probe import LinkSpeeds

FAST, SLOW, MEGABYTE = 125e6, 12.5e6, 10**6


def uniform(size: int, bandwidth: float, latency: float) -> LinkSpeeds:
    matrix = [[0.0 if a == b else bandwidth for b in range(size)] for a in range(size)]
    return LinkSpeeds([[0.0 if a == b else latency for b in range(size)] for a in range(size)], matrix)


def two_islands(members: list[list[int]]) -> LinkSpeeds:
    size = sum(map(len, members))
    home = {rank: island for island, ranks in enumerate(members) for rank in ranks}
    matrix = [[0.0 if a == b else FAST if home[a] == home[b] else SLOW for b in range(size)] for a in range(size)]
    return LinkSpeeds([[1e-4] * size for _ in range(size)], matrix)


def test_ring_and_direct_move_the_same_bytes_and_differ_in_latencies() -> None:
    speeds = uniform(8, FAST, 1e-3)
    bytes_time = 2 * 7 / 8 * 80 * MEGABYTE / FAST
    assert cost_ring(80 * MEGABYTE, speeds, range(8)) == pytest.approx(bytes_time + 14e-3)
    assert cost_direct(80 * MEGABYTE, speeds, range(8)) == pytest.approx(bytes_time + 2e-3)


def test_two_levels_hide_the_faster_level_behind_the_slower() -> None:
    speeds = two_islands([[0, 1], [2, 3]])
    across = 2 * (10 * MEGABYTE / 2) / SLOW / 2 + 2e-4
    inside = 2 * (10 * MEGABYTE / 2) / FAST + 2e-4
    expected = across + inside * (2 << 20) / (10 * MEGABYTE)
    assert cost_two_level(10 * MEGABYTE, speeds, [[0, 1], [2, 3]]) == pytest.approx(expected)


def test_islands_are_found_whatever_their_numbering() -> None:
    assert islands_of_links(two_islands([[0, 2], [1, 3]]).bandwidth) == [[0, 2], [1, 3]]
    assert islands_of_links(two_islands([[0, 1, 2], [3]]).bandwidth) == []
    assert islands_of_links(uniform(4, FAST, 0).bandwidth) == []


def test_far_apart_hosts_go_direct_and_islands_two_level() -> None:
    hosts = [f"h{host}" for host in range(4)]
    assert choose_by_cost(25 * MEGABYTE, uniform(4, FAST, 0.03), hosts).algorithm == "direct"
    choice = choose_by_cost(25 * MEGABYTE, two_islands([[0, 2], [1, 3]]), hosts)
    assert choice.algorithm == "two_level"
    assert choice.islands == [[0, 2], [1, 3]]
    assert set(choice.seconds) == {"ring", "direct", "two_level"}


def test_one_slow_cable_is_avoided_by_the_ring_alone() -> None:
    speeds = uniform(5, FAST, 1e-4)
    speeds.bandwidth[0][1] = speeds.bandwidth[1][0] = SLOW
    choice = choose_by_cost(25 * MEGABYTE, speeds, [f"h{host}" for host in range(5)])
    assert choice.algorithm == "ring"
    assert choice.ring_order is not None
    assert abs(choice.ring_order.index(0) - choice.ring_order.index(1)) in (2, 3)


def test_a_lossy_wire_rules_the_ring_out() -> None:
    choice = choose_by_cost(25 * MEGABYTE, uniform(4, FAST, 1e-4), list("abcd"), wire="int8")
    assert choice.algorithm == "direct"
    assert "ring" not in choice.seconds
