"""Who talks to whom: ring order, islands, the probe, and what "auto" makes of it."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch.distributed import HashStore

from lightning_llmscale.collectives.links import Watch
from lightning_llmscale.collectives.probe import LinkSpeeds, measure_links, tournament
from lightning_llmscale.collectives.protocol import Group
from lightning_llmscale.collectives.reducer import ReducerOptions, choose_algorithm
from lightning_llmscale.collectives.ring_order import best_ring_order, ring_bottleneck
from lightning_llmscale.collectives.two_level import islands_of_hosts
from lightning_llmscale.errors import ConfigurationError
from tests.unit.collectives.threads_world import one_host, open_everywhere, run_ranks, several_hosts, two_hosts

FAST, SLOW = 125e6, 12.5e6


def islands(members: list[list[int]]) -> list[list[float]]:
    """Fast links inside each island, slow ones between."""
    size = sum(map(len, members))
    home = {rank: island for island, ranks in enumerate(members) for rank in ranks}
    return [[0.0 if a == b else FAST if home[a] == home[b] else SLOW for b in range(size)] for a in range(size)]


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 9])
def test_in_a_tournament_everyone_meets_everyone_once(players: int) -> None:
    rounds = tournament(players)
    assert len(rounds) == players - 1 + players % 2
    for pairs in rounds:
        flat = list(itertools.chain(*pairs))
        assert len(flat) == len(set(flat))
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(players), 2))


@pytest.mark.parametrize(
    "members", [[[0, 2], [1, 3]], [[0, 3, 5], [1, 2, 4]], [list(range(0, 12, 2)), list(range(1, 12, 2))]]
)
def test_the_best_ring_crosses_between_two_islands_twice(members: list[list[int]]) -> None:
    bandwidth = islands(members)
    order = best_ring_order(bandwidth)
    crossings = sum(bandwidth[a][b] == SLOW for a, b in zip(order, [*order[1:], order[0]], strict=True))
    assert order[0] == 0
    assert sorted(order) == list(range(len(bandwidth)))
    assert crossings == 2


def test_the_best_ring_avoids_a_slow_link_altogether_where_it_can() -> None:
    bandwidth = islands([[0, 1, 2, 3]])
    bandwidth[0][1] = bandwidth[1][0] = SLOW
    order = best_ring_order(bandwidth)
    assert ring_bottleneck(order, bandwidth)[0] == FAST
    assert ring_bottleneck([0, 1, 2, 3], bandwidth)[0] == SLOW


def test_islands_are_the_ranks_of_each_host() -> None:
    assert islands_of_hosts(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_learn_the_same_positive_speeds(world_size: int) -> None:
    store, hosts = HashStore(), several_hosts(world_size)

    def measure(rank: int) -> LinkSpeeds:
        return measure_links(Group(tuple(range(world_size)), tuple(hosts), store, Watch(rank, 20.0, lambda: None)))

    speeds = run_ranks(world_size, measure)
    assert all(one == speeds[0] for one in speeds)
    for a, b in itertools.permutations(range(world_size), 2):
        assert speeds[0].bandwidth[a][b] > 0  # type: ignore[union-attr]
        assert speeds[0].latency[a][b] > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("order", [[0, 2, 1, 3], "auto"])
def test_a_ring_in_another_order_sums_the_same(order) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere("ring", one_host(4), options=ReducerOptions(ring_order=order))
    tensors = [torch.full((1001,), float(rank + 1)) for rank in range(4)]
    run_ranks(4, lambda rank: reducers[rank].all_reduce(tensors[rank], 0.5))
    for reducer in reducers:
        reducer.close()
    assert all(tensor.tolist() == [5.0] * 1001 for tensor in tensors)


def test_deterministic_gives_the_bits_of_a_sum_in_rank_order_on_any_topology() -> None:
    tensors = [torch.randn(10_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    expected = ((tensors[0] + tensors[1]) + tensors[2]) + tensors[3]
    for hosts in (one_host(4), two_hosts(4), several_hosts(4)):
        reducers = open_everywhere("auto", hosts, options=ReducerOptions(deterministic=True))
        mine = [tensor.clone() for tensor in tensors]
        run_ranks(4, lambda rank, mine=mine, reducers=reducers: reducers[rank].all_reduce(mine[rank], 1.0))
        for reducer in reducers:
            reducer.close()
        assert all(torch.equal(tensor, expected) for tensor in mine)


@pytest.mark.parametrize(
    ("hosts", "options", "expected"),
    [
        (one_host(4), ReducerOptions(), "shared_memory"),
        (two_hosts(4), ReducerOptions(), "two_level"),
        (["a", "a", "b"], ReducerOptions(), "ring"),
        (several_hosts(4), ReducerOptions(), "ring"),
        (several_hosts(4), ReducerOptions(wire="int8"), "direct"),
        (one_host(4), ReducerOptions(wire="bf16"), "direct"),
        (two_hosts(4), ReducerOptions(wire="int8"), "two_level"),
        (two_hosts(4), ReducerOptions(deterministic=True), "direct"),
        (two_hosts(4), ReducerOptions(ring_order="auto"), "ring"),
        (several_hosts(4), ReducerOptions(islands=[[0, 1], [2, 3]]), "two_level"),
    ],
)
def test_auto_follows_hosts_and_options(hosts, options, expected) -> None:  # type: ignore[no-untyped-def]
    assert choose_algorithm("auto", world_size=len(hosts), hosts=hosts, options=options) == expected


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        ("ring", ReducerOptions(wire="int8"), r"wire='int8' has no effect with algorithm='ring'"),
        ("direct", ReducerOptions(error_feedback=True), "drops nothing"),
        ("direct", ReducerOptions(ring_order="auto"), "ring_order"),
        ("shared_memory", ReducerOptions(segment_bytes=4096), "segment_bytes"),
        ("ring", ReducerOptions(segment_bytes=1000), "multiple of 1024"),
        ("ring", ReducerOptions(deterministic=True), "'direct' or 'shared_memory'"),
        ("stock", ReducerOptions(islands=[[0], [1]]), "islands"),
    ],
)
def test_options_without_effect_are_refused(algorithm, options, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        choose_algorithm(algorithm, world_size=2, hosts=one_host(2), options=options)


@pytest.mark.parametrize(
    ("algorithm", "hosts", "options", "words"),
    [
        ("two_level", ["a", "a", "b"], ReducerOptions(), "same number of ranks"),
        ("two_level", ["a", "b", "c"], ReducerOptions(islands=[[0, 1], [2, 1]]), "once"),
        ("ring", ["a", "b", "c"], ReducerOptions(ring_order=[0, 1, 1]), r"\[0, 1, 2\] once"),
    ],
)
def test_impossible_layouts_are_refused_on_every_rank(algorithm, hosts, options, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        open_everywhere(algorithm, hosts, options=options)


def test_auto_between_hosts_measures_and_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reducers = open_everywhere("auto", several_hosts(4))
    tensors = [torch.full((1001,), float(rank + 1)) for rank in range(4)]
    run_ranks(4, lambda rank: reducers[rank].all_reduce(tensors[rank], 0.5))
    for reducer in reducers:
        reducer.close()
    assert all(tensor.tolist() == [5.0] * 1001 for tensor in tensors)
    (line,) = [record.getMessage() for record in caplog.records if "Chose algorithm" in record.getMessage()]
    assert "4 ranks on 4 hosts" in line
    assert "direct" in line
    assert "ring" in line
