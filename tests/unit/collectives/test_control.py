"""The control plane over real connections, one thread per rank."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_llmscale.collectives.control import ControlPlane
from lightning_llmscale.errors import PeerFailureError


def on_ranks(
    world: int, job: Callable[[ControlPlane], Any], store: HashStore | None = None, **options: Any
) -> list[Any]:
    """`job(plane)` on a thread per rank, with the errors as values; planes are closed when all are done."""
    store, results, done = store or HashStore(), [None] * world, threading.Barrier(world, timeout=30)

    def run(rank: int) -> None:
        plane = ControlPlane(store, rank=rank, world_size=world, **options)
        try:
            results[rank] = job(plane)
        except PeerFailureError as error:
            results[rank] = error
        finally:
            done.wait()
            plane.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def messages(results: list[Any]) -> list[str]:
    assert all(isinstance(result, PeerFailureError) for result in results), results
    return [str(result) for result in results]


def test_every_rank_gets_every_payload_in_rank_order() -> None:
    payloads = [b"", b"x" * 3, b"y" * 200_000]
    results = on_ranks(3, lambda plane: [plane.exchange("sizes", payloads[plane.rank]) for _ in range(3)])
    assert results == [[payloads] * 3] * 3


def test_a_single_rank_needs_no_connection() -> None:
    plane = ControlPlane(HashStore(), rank=0, world_size=1)
    assert plane.exchange("alone", b"a") == [b"a"]
    plane.close()


def test_ranks_in_different_operations_are_told_where_the_others_are() -> None:
    for text in messages(on_ranks(2, lambda plane: plane.exchange("A" if plane.rank == 1 else "B"))):
        assert "rank 0 is waiting in B" in text
        assert "rank 1 is waiting in A" in text


def test_a_rank_that_fails_tells_all_others_why() -> None:
    def job(plane: ControlPlane) -> Any:
        if plane.rank == 1:
            plane.fail("rank 1 raised ValueError: boo")
        return plane.exchange("next")

    assert set(messages(on_ranks(3, job))) == {"rank 1 raised ValueError: boo"}


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_fails_those_who_wait_for_it(leaver: int) -> None:
    def job(plane: ControlPlane) -> Any:
        plane.exchange("start")
        if plane.rank == leaver:
            return plane.close("has ended its program")
        return plane.exchange("the barrier 'save'")

    results = on_ranks(3, job)
    results.pop(leaver)
    for text in messages(results):
        assert f"rank {leaver}" in text
        assert "has ended its program" in text
        assert "the barrier 'save'" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_broken_connection_is_named(victim: int) -> None:
    def job(plane: ControlPlane) -> Any:
        plane.exchange("start")
        if plane.rank == victim:
            for link in plane._links.values():
                link.sock.shutdown(socket.SHUT_RDWR)
            return None
        return plane.exchange("next")

    results = on_ranks(3, job)
    results.pop(victim)
    for text in messages(results):
        assert f"rank {victim} (pid " in text
        assert "died" in text


def test_a_deadlock_with_the_data_plane_ends_in_words() -> None:
    def job(plane: ControlPlane) -> Any:
        if plane.rank == 0:
            return plane.exchange("a barrier")
        poll, deadline = plane.waiting("the all-reduce of gradients"), time.monotonic() + 30
        while (failure := poll()) is None and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        raise PeerFailureError(str(failure))

    for text in messages(on_ranks(2, job)):
        assert text.startswith("deadlock: rank 0 is waiting in a barrier, rank 1 is waiting in the all-reduce")


def test_strangers_are_not_listened_to() -> None:
    store = HashStore()

    def stranger() -> None:
        where = json.loads(store.get("llmscale/control/1"))
        with socket.create_connection(("127.0.0.1", where["port"]), timeout=5) as sock:
            sock.sendall(b"\0" * 36)
            assert sock.recv(1) == b"", "rank 0 hangs up"

    intruder = threading.Thread(target=stranger)
    intruder.start()

    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        if rank:
            intruder.join()
        plane = ControlPlane(store, rank=rank, world_size=2)
        results[rank] = plane.exchange("start", bytes([rank]))
        plane.exchange("end")
        plane.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [[b"\0", b"\1"]] * 2


def test_planes_opened_one_after_the_other_do_not_meet() -> None:
    store = HashStore()
    assert on_ranks(2, lambda plane: plane.exchange("first"), store) == [[b"", b""]] * 2
    assert on_ranks(2, lambda plane: plane.exchange("second"), store) == [[b"", b""]] * 2
