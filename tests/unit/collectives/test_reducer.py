"""Every algorithm sums like float64 does, gives all ranks the same bits, and says why when it cannot."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from lightning_llmscale.collectives.reducer import ALGORITHMS, choose_algorithm, open_reducer
from lightning_llmscale.errors import ConfigurationError, PeerFailureError
from tests.unit.collectives.threads_world import one_host, open_everywhere, run_ranks, several_hosts, two_hosts

OWN_ALGORITHMS = [
    ("ring", one_host),
    ("ring", several_hosts),
    ("shared_memory", one_host),
    ("direct", one_host),
    ("two_level", two_hosts),
]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def inputs(world_size: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world_size)]


def reduce_everywhere(reducers, tensors, scale):  # type: ignore[no-untyped-def]
    results = run_ranks(len(reducers), lambda rank: reducers[rank].all_reduce(tensors[rank], scale))
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_scaled_sum_with_identical_bits_on_all_ranks(algorithm, hosts, world_size) -> None:  # type: ignore[no-untyped-def]
    if algorithm == "two_level" and world_size < 4:
        pytest.skip("two levels take two hosts of two ranks")
    reducers = open_everywhere(algorithm, hosts(world_size))
    try:
        # Lengths: empty, fewer elements than ranks, odd, one segment and a bit, several windows and a bit.
        for length in (0, 1, world_size - 1, 17, 131_073, 1_200_007):
            for dtype, tolerance in TOLERANCE.items():
                if length > 200_000 and dtype in (torch.float64, torch.float16):
                    continue
                tensors = inputs(world_size, length, dtype)
                expected = torch.stack([tensor.double() for tensor in tensors]).sum(0) / world_size
                reduce_everywhere(reducers, tensors, 1 / world_size)
                for tensor in tensors[1:]:
                    assert torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8))
                torch.testing.assert_close(tensors[0].double(), expected, rtol=tolerance, atol=tolerance)
    finally:
        for reducer in reducers:
            reducer.close()


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_on_one_rank_reaches_all(algorithm, hosts, value) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere(algorithm, hosts(4))
    try:
        tensors = [torch.ones(10) for _ in range(4)]
        tensors[1][7] = value
        reduce_everywhere(reducers, tensors, 1.0)
        for tensor in tensors:
            assert torch.isfinite(tensor).tolist() == [True] * 7 + [False] + [True] * 2
    finally:
        for reducer in reducers:
            reducer.close()


def test_half_types_in_shared_memory_are_rounded_once() -> None:
    reducers = open_everywhere("shared_memory", one_host(4))
    try:
        # fp16 cannot hold the sum, 160000, nor bf16 the partial sums 257 and 258; the scaled results fit.
        big = [torch.full((8,), 40_000.0, dtype=torch.float16) for _ in range(4)]
        reduce_everywhere(reducers, big, 0.25)
        fine = [torch.full((8,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16) for rank in range(4)]
        reduce_everywhere(reducers, fine, 1.0)
        assert big[2].tolist() == [40_000.0] * 8
        assert fine[2].tolist() == [260.0] * 8  # 259 rounded once to bf16; rounding each partial sum gives 256
    finally:
        for reducer in reducers:
            reducer.close()


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
def test_ranks_may_meet_again_through_the_same_store(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    store = HashStore()
    for _ in range(3):
        reducers = open_everywhere(algorithm, hosts(4), store=store)
        tensors = inputs(4, 5, torch.float32)
        expected = torch.stack(tensors).sum(0)
        reduce_everywhere(reducers, tensors, 1.0)
        for reducer in reducers:
            reducer.close()
        torch.testing.assert_close(tensors[1], expected)


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
def test_nothing_stays_open_after_close(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    def opened() -> tuple[int, int]:
        windows = sum("llmscale" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(list(Path("/proc/self/fd").iterdir())), windows

    before = opened()
    reducers = open_everywhere(algorithm, hosts(4))
    reduce_everywhere(reducers, inputs(4, 100, torch.float32), 1.0)
    assert opened() > before
    for reducer in reducers:
        reducer.close()
        reducer.close()
    assert opened() == before


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
def test_a_rank_that_leaves_is_named_on_all_others(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere(algorithm, hosts(4))

    def work(rank: int) -> None:
        if rank == 2:
            reducers[rank].close()
        else:
            reducers[rank].all_reduce(torch.ones(1000), 1.0)

    results = run_ranks(4, work)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], PeerFailureError)
        assert "rank 2" in str(results[rank])
        assert "all-reduce 1" in str(results[rank])
        with pytest.raises(PeerFailureError):  # broken for good, and at once
            reducers[rank].all_reduce(torch.ones(1), 1.0)
        reducers[rank].close()


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
def test_a_rank_that_never_joins_is_named_at_the_timeout(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere(algorithm, hosts(4), peer_timeout=1.0)
    results = run_ranks(4, lambda rank: None if rank == 2 else reducers[rank].all_reduce(torch.ones(1000), 1.0))
    for reducer in reducers:
        reducer.close()
    for rank in (0, 1, 3):
        assert isinstance(results[rank], PeerFailureError)
        assert "for rank 2 in" in str(results[rank])
        assert "heard nothing" in str(results[rank])


@pytest.mark.parametrize(("algorithm", "hosts"), OWN_ALGORITHMS)
def test_a_failure_known_elsewhere_ends_the_wait(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    store, names = HashStore(), hosts(2)
    told: list[str] = []
    if algorithm == "two_level":
        pytest.skip("two levels take four ranks; each of them waits as the others do")
    reducers = run_ranks(
        2,
        lambda rank: open_reducer(
            algorithm,
            rank=rank,
            world_size=2,
            store=store,
            hosts=names,
            peer_timeout=60.0,
            failure=lambda: told[0] if told else None,
        ),
    )
    told.append("Rank 1 ran out of batches.")
    with pytest.raises(PeerFailureError, match=r"Rank 1 ran out of batches\. .*rank 0 was waiting for rank 1"):
        reducers[0].all_reduce(torch.ones(10), 1.0)  # type: ignore[union-attr]
    for reducer in reducers:
        reducer.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(("algorithm", "hosts"), [OWN_ALGORITHMS[0], OWN_ALGORITHMS[1], OWN_ALGORITHMS[3]])
def test_ranks_that_reduce_different_tensors_are_told(algorithm, hosts) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere(algorithm, hosts(2))
    results = run_ranks(2, lambda rank: reducers[rank].all_reduce(torch.ones(100 + rank), 1.0))
    for reducer in reducers:
        reducer.close()
    assert all("different tensors" in str(result) for result in results)


def test_a_rank_without_memory_for_the_window_is_named_on_all_ranks() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigurationError, match=r"Rank 0 cannot reserve .* MiB of shared memory"):
            open_everywhere("shared_memory", one_host(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_auto_falls_back_to_the_ring_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with caplog.at_level(logging.WARNING):
            reducers = open_everywhere("auto", one_host(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tensors = inputs(2, 9, torch.float32)
    expected = tensors[0] + tensors[1]
    reduce_everywhere(reducers, tensors, 1.0)
    for reducer in reducers:
        reducer.close()
    assert torch.equal(tensors[0], expected)
    assert "Falling back from shared memory to the ring" in caplog.text


def test_auto_is_shared_memory_on_one_host_and_the_ring_between_hosts() -> None:
    assert choose_algorithm("auto", world_size=2, hosts=["a", "a"]) == "shared_memory"
    assert choose_algorithm("auto", world_size=3, hosts=["a", "a", "b"]) == "ring"
    assert choose_algorithm("ring", world_size=2, hosts=["a", "a"]) == "ring"


def test_one_rank_only_scales() -> None:
    reducer = open_reducer("auto", rank=0, world_size=1, store=HashStore(), hosts=["a"])
    flat = torch.full((3,), 4.0)
    reducer.all_reduce(flat, 0.5)
    reducer.close()
    assert flat.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "rings"}, ", ".join(repr(name) for name in ALGORITHMS)),
        ({"hosts": ["a"]}, "hosts names 1 ranks"),
        ({"rank": 2}, r"one of \[0, 1\]"),
        ({"members": [1]}, r"rank is 0 and must be one of \[1\]"),
        ({"members": [0, 5]}, r"all in 0\.\.1"),
        ({"peer_timeout": 0.0}, "must be positive"),
        ({"algorithm": "shared_memory", "hosts": ["a", "b"]}, "one machine"),
        ({"algorithm": "stock"}, "init_process_group"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy(changes, words) -> None:  # type: ignore[no-untyped-def]
    arguments = {"algorithm": "ring", "rank": 0, "world_size": 2, "hosts": ["a", "a"], "peer_timeout": 1.0, **changes}
    algorithm = arguments.pop("algorithm")
    with pytest.raises(ConfigurationError, match=words):
        open_reducer(algorithm, store=HashStore(), **arguments)


def test_a_rank_that_does_not_show_up_is_named() -> None:
    with pytest.raises(PeerFailureError, match="rank 1"):
        open_reducer("ring", rank=0, world_size=2, store=HashStore(), hosts=["a", "a"], peer_timeout=0.3)
