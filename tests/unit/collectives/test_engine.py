"""The communication thread: order, errors, and what it leaves of the process around it."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from lightning_llmscale.collectives.engine import CommunicationThread
from lightning_llmscale.errors import PeerFailureError


class RecordingReducer:
    """Stands in for the network: multiplies, after the gate opens, and fails when told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[int] = []
        self.threads: set[str] = set()
        self.intra_op_threads = 0
        self.fail_at: int | None = None
        self.closed = 0

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        self.gate.wait(20)
        self.threads.add(threading.current_thread().name)
        self.intra_op_threads = torch.get_num_threads()
        self.seen.append(flat.numel())
        if self.fail_at is not None and len(self.seen) > self.fail_at:
            raise PeerFailureError("Rank 1 died.")
        flat.mul_(scale)

    def close(self, reason: str | None = None) -> None:
        self.closed += 1
        self.gate.set()


def test_buckets_are_reduced_in_the_order_they_came_by_one_thread() -> None:
    reducer = RecordingReducer()
    thread = CommunicationThread(reducer)
    futures = [thread.submit(torch.ones(length), 2.0) for length in range(1, 30)]
    assert not any(future.done() for future in futures)
    reducer.gate.set()
    results = [future.wait() for future in futures]
    thread.close()
    assert reducer.seen == list(range(1, 30))
    assert len(reducer.threads) == 1
    assert all(result.eq(2.0).all() for result in results)


def test_after_an_error_every_future_completes_and_the_reducer_is_left_alone() -> None:
    reducer = RecordingReducer()
    reducer.fail_at = 1
    thread = CommunicationThread(reducer)
    futures = [thread.submit(torch.ones(3), 2.0) for _ in range(4)]
    reducer.gate.set()
    values = [future.wait()[0].item() for future in futures]
    late = thread.submit(torch.ones(3), 2.0).wait()
    error = thread.error
    thread.close()
    assert values == [2.0, 1.0, 1.0, 1.0]
    assert late[0].item() == 1.0
    assert isinstance(error, PeerFailureError)
    assert len(reducer.seen) == 2


def test_its_own_thread_computes_on_one_core_and_all_others_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reducer = RecordingReducer()
        reducer.gate.set()
        thread = CommunicationThread(reducer)
        thread.submit(torch.ones(3), 1.0).wait()
        later: list[int] = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (reducer.intra_op_threads, torch.get_num_threads(), later) == (1, 2, [2])
        thread.close()
    finally:
        torch.set_num_threads(before)


def test_drain_waits_for_all_and_has_a_deadline() -> None:
    reducer = RecordingReducer()
    thread = CommunicationThread(reducer)
    thread.drain(0.0)
    thread.submit(torch.ones(3), 2.0)
    with pytest.raises(PeerFailureError, match="1 all-reduces"):
        thread.drain(0.05)
    reducer.gate.set()
    thread.drain(20.0)
    thread.close()


def test_closing_ends_an_all_reduce_under_way_and_may_be_repeated() -> None:
    reducer = RecordingReducer()
    thread = CommunicationThread(reducer)
    future = thread.submit(torch.ones(3), 2.0)
    thread.close()
    thread.close()
    assert future.done()
    assert reducer.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(torch.ones(3), 2.0)
