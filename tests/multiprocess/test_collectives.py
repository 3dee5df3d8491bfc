"""Reducers between real processes: agreement with torch's all-reduce, deaths and stalls, and DDP on top."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_llmscale.collectives.ddp_hook import BucketReduction, reduce_bucket
from lightning_llmscale.collectives.engine import CommunicationThread
from lightning_llmscale.collectives.reducer import Algorithm, Reducer, open_reducer
from lightning_llmscale.errors import PeerFailureError
from tests.support.pool import Outcome, RankPool

ALGORITHMS: list[tuple[Algorithm, bool]] = [
    ("ring", True),
    ("ring", False),
    ("shared_memory", True),
    ("direct", False),
]
"""Each own algorithm, and whether the ranks share a host (else they use TCP)."""

NOTICED_SECONDS = 2.0
"""A death is noticed in well under a second; the rest is for a machine that is busy with something else."""


@pytest.fixture(scope="session")
def pool3(pool1: RankPool) -> Iterator[RankPool]:
    return RankPool(3, server=pool1)


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def connect() -> TCPStore:
    return TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), world_size(), rank() == 0, timeout=timedelta(seconds=30)
    )


def open_here(
    algorithm: Algorithm,
    one_host: bool,
    store: TCPStore,
    peer_timeout: float = 30.0,
    members: Sequence[int] | None = None,
) -> Reducer:
    hosts = ["here"] * world_size() if one_host else [f"host{peer}" for peer in range(world_size())]
    if algorithm == "two_level":
        hosts = ["left"] * 2 + ["right"] * 2
    return open_reducer(
        algorithm,
        rank=rank(),
        world_size=world_size(),
        store=store,
        hosts=hosts,
        peer_timeout=peer_timeout,
        members=members,
    )


def agree_with_torch() -> None:
    store = connect()
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank(), world_size=world_size())
    reducers = [open_here(algorithm, one_host, store) for algorithm, one_host in [*ALGORITHMS, ("stock", True)]]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for length in (1, 5, 70_001):
            mine = torch.randn(length, generator=torch.Generator().manual_seed(rank())).to(dtype)
            expected = mine.clone()
            dist.all_reduce(expected)
            for reducer in reducers:
                flat = mine.clone()
                reducer.all_reduce(flat, 0.5)
                torch.testing.assert_close(flat, expected * 0.5, rtol=tolerance, atol=tolerance)
                assert same_bits_everywhere(flat)
    for reducer in reducers:
        reducer.close()
    dist.destroy_process_group()


def same_bits_everywhere(flat: torch.Tensor) -> bool:
    mine = flat.view(torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(other, mine) for other in gathered)


def test_all_algorithms_agree_with_torch_and_between_ranks(pool2: RankPool, pool4: RankPool) -> None:
    pool2.run(agree_with_torch)
    pool4.run(agree_with_torch)


def lose_rank_1(algorithm: Algorithm, one_host: bool, mid_way: bool) -> tuple[str, float]:
    """Rank 1 kills itself; the others return what they were told and when."""
    store = connect()
    reducer = open_here(algorithm, one_host, store, peer_timeout=60.0)
    flat = torch.ones(4_000_000)
    reducer.all_reduce(flat, 1.0)
    if rank() == 1:
        store.set("died", str(time.monotonic()))
        if not mid_way:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            reducer.all_reduce(flat, 1.0)
    except PeerFailureError as error:
        noticed = time.monotonic()
        words = str(error)
    reducer.close()
    died = float(store.get("died"))
    store.add("survivors", 1)
    while rank() == 0 and store.add("survivors", 0) < world_size() - 1:  # rank 0 serves the store
        time.sleep(0.01)
    return words, noticed - died


@pytest.mark.parametrize(("algorithm", "one_host"), ALGORITHMS)
@pytest.mark.parametrize("mid_way", [False, True])
def test_a_killed_rank_is_named_at_once_on_every_survivor(
    pool3: RankPool, algorithm: Algorithm, one_host: bool, mid_way: bool
) -> None:
    outcomes = pool3.outcomes(lose_rank_1, algorithm, one_host, mid_way, timeout=50)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, str(outcome)
        words, seconds = outcome.value
        assert "rank 1" in words
        assert "all-reduce" in words
        assert seconds < NOTICED_SECONDS


def test_a_killed_rank_is_named_through_both_levels(pool4: RankPool) -> None:
    outcomes = pool4.outcomes(lose_rank_1, "two_level", False, True, timeout=50)
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome.ok, str(outcome)
        words, seconds = outcome.value
        assert "rank 1" in words
        assert seconds < NOTICED_SECONDS


def go_on_without_rank_1(algorithm: Algorithm, one_host: bool) -> tuple[float, float]:
    """Survivors connect anew in the same processes; the sum and how long the connecting took."""
    store = connect()
    reducer = open_here(algorithm, one_host, store)
    reducer.all_reduce(torch.ones(10), 1.0)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    flat = torch.full((100_000,), float(rank() + 1))
    with pytest.raises(PeerFailureError, match="rank 1"):
        reducer.all_reduce(flat.clone(), 1.0)
    reducer.close()
    started = time.monotonic()
    reducer = open_here(algorithm, one_host, store, members=[0, 2])
    seconds = time.monotonic() - started
    reducer.all_reduce(flat, 1.0)
    reducer.close()
    store.add("survivors", 1)
    while rank() == 0 and store.add("survivors", 0) < 2:  # rank 0 serves the store
        time.sleep(0.01)
    return flat.max().item(), seconds


@pytest.mark.parametrize(("algorithm", "one_host"), ALGORITHMS)
def test_survivors_go_on_in_the_same_processes(pool3: RankPool, algorithm: Algorithm, one_host: bool) -> None:
    outcomes = pool3.outcomes(go_on_without_rank_1, algorithm, one_host, timeout=50)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, str(outcome)
        total, seconds = outcome.value
        assert total == 4.0
        assert seconds < NOTICED_SECONDS


def stall_rank_1(algorithm: Algorithm, one_host: bool) -> str | None:
    """Rank 1 stops itself; the others run into their timeout and wake it up again."""
    store = connect()
    reducer = open_here(algorithm, one_host, store, peer_timeout=1.5)
    reducer.all_reduce(torch.ones(10), 1.0)
    if rank() == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(3):
            reducer.all_reduce(torch.ones(1_000_000), 1.0)
    except PeerFailureError as error:
        words = str(error)
    else:
        words = None
    reducer.close()
    if store.add("done", 1) == 2:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    while rank() == 0 and store.add("done", 0) < 3:  # rank 0 serves the store
        time.sleep(0.01)
    return words


@pytest.mark.parametrize(("algorithm", "one_host"), ALGORITHMS)
def test_a_stopped_rank_is_named_at_the_timeout(pool3: RankPool, algorithm: Algorithm, one_host: bool) -> None:
    words = pool3.run(stall_rank_1, algorithm, one_host, timeout=50)
    for told in (words[0], words[2]):
        assert "for rank 1 in" in told
        assert "heard nothing" in told
    assert words[1] is not None  # awake again, it learns that the others have left


def train(reduction: str, steps: int) -> torch.Tensor:
    """A few steps of DDP, several buckets each; the weights in one tensor."""
    store = connect()
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank(), world_size=world_size())
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 8))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    thread = None
    if reduction != "ddp":
        thread = CommunicationThread(open_here(reduction, True, store))
        ddp.register_comm_hook(BucketReduction(thread, 1 / world_size()), reduce_bucket)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank())
    for _ in range(steps):
        loss = ddp(torch.randn(16, 64, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if thread is not None:
        assert thread.error is None
        thread.close()
    # Before the group: destroyed by the last reference from DDP, it joins gloo's threads without releasing the GIL that
    # these may need to let go of their last work.
    del ddp, loss
    dist.destroy_process_group()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("reduction", ["ring", "shared_memory", "stock"])
def test_ddp_with_the_hook_trains_the_same_weights(pool2: RankPool, reduction: str) -> None:
    stock = pool2.run(train, "ddp", 4)
    ours = pool2.run(train, reduction, 4)
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-7)


def train_until_rank_1_dies(reduction: Algorithm) -> str:
    """Backward must come back after a peer's death, and the error be there for the strategy to raise."""
    store = connect()
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank(), world_size=world_size())
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)
    thread = CommunicationThread(open_here(reduction, True, store))
    ddp.register_comm_hook(BucketReduction(thread, 1 / world_size()), reduce_bucket)
    for step in range(4):
        loss = ddp(torch.ones(4, 256)).sum()
        if rank() == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if thread.error is not None:
            break
    words = str(thread.error)
    thread.close()
    return words


@pytest.mark.parametrize("reduction", ["ring", "shared_memory"])
def test_backward_returns_after_a_death_and_leaves_the_error(pool2: RankPool, reduction: Algorithm) -> None:
    outcomes: list[Outcome] = pool2.outcomes(train_until_rank_1_dies, reduction, timeout=50)
    assert outcomes[0].ok, str(outcomes[0])
    assert "rank 1" in outcomes[0].value


def close_under_way(algorithm: Algorithm, one_host: bool) -> None:
    """A reducer may be closed by another thread than the one that waits in it."""
    store = connect()
    reducer = open_here(algorithm, one_host, store)
    if rank() == 0:
        started = threading.Event()
        failures: list[BaseException] = []

        def reduce(target: Callable[[torch.Tensor, float], None]) -> None:
            started.set()
            try:
                target(torch.ones(1000), 1.0)
            except PeerFailureError as error:
                failures.append(error)

        waiting = threading.Thread(target=reduce, args=(reducer.all_reduce,))
        waiting.start()
        started.wait(20)
        reducer.close()
        waiting.join(20)
        assert not waiting.is_alive()
        assert len(failures) == 1
        store.set("closed", "")
        store.wait(["heard"])  # the store lives in this process
    else:
        store.wait(["closed"])
        store.set("heard", "")
        with pytest.raises(PeerFailureError, match="rank 0"):
            reducer.all_reduce(torch.ones(1000), 1.0)
        reducer.close()


@pytest.mark.parametrize(("algorithm", "one_host"), ALGORITHMS)
def test_closing_wakes_the_thread_that_waits(pool2: RankPool, algorithm: Algorithm, one_host: bool) -> None:
    pool2.run(close_under_way, algorithm, one_host)
