"""Streams between ranks: strangers, ends and the choice of address."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import HashStore

from lightning_llmscale.collectives.links import Link, LinkClosedError, Listener, Rendezvous, Watch, connect_links
from lightning_llmscale.errors import ConfigurationError, PeerFailureError
from tests.unit.collectives.threads_world import run_ranks


def watch(rank: int = 0, peer_timeout: float = 5.0) -> Watch:
    return Watch(rank, peer_timeout, lambda: None)


def test_receiving_comes_back_to_its_caller_while_nothing_arrives() -> None:
    ours, theirs = socket.socketpair()
    link, ticks = Link(ours, 1), []

    def tick(progress: bool) -> None:
        ticks.append(progress)
        theirs.sendall(b"ab" if len(ticks) == 1 else b"cd")

    target = bytearray(4)
    link.receive_into(memoryview(target), tick)
    link.close()
    theirs.close()
    assert bytes(target) == b"abcd"
    assert ticks[0] is False


def test_the_end_of_a_link_names_the_peer() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, 3)
    theirs.close()
    with pytest.raises(LinkClosedError, match="rank 3"):
        link.receive_into(memoryview(bytearray(4)), lambda _: None)
    with pytest.raises(LinkClosedError, match="rank 3"):
        link.send(memoryview(bytes(4)), lambda _: None)
    assert link.poll() == b""
    link.close()


def test_strangers_are_turned_away() -> None:
    listener = Listener("a", ["a", "b"], backlog=4)
    address = tuple(listener.address["tcp"])
    stranger = socket.create_connection(address)
    stranger.sendall(bytes(20))
    friend = threading.Thread(target=_greet, args=(address, listener.address["secret"]))
    friend.start()
    links = listener.accept([1], watch(), "test")
    friend.join()
    listener.close()
    assert list(links) == [1]
    stranger.settimeout(5)
    assert stranger.recv(1) == b""
    stranger.close()
    links[1].close()


def _greet(address: tuple[str, int], secret: str) -> None:
    with socket.create_connection(address) as sock:
        sock.sendall(bytes.fromhex(secret) + (1).to_bytes(4, "big"))


def test_hosts_choose_the_family_of_sockets() -> None:
    families = {}
    for hosts in (["a", "a"], ["a", "b"], ["a", "a", "b"]):
        listener = Listener("a", hosts, backlog=1)
        families[len(hosts), len(set(hosts))] = {"unix", "tcp"} & set(listener.address)
        listener.close()
    assert families == {(2, 1): {"unix"}, (2, 2): {"tcp"}, (3, 2): {"unix", "tcp"}}


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ConfigurationError, match="'nosuch0'"):
        Listener("a", ["a", "b"], backlog=1)


def test_the_interface_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listener = Listener("a", ["a", "b"], backlog=1)
    listener.close()
    assert listener.address["tcp"][0] == "127.0.0.1"


def test_a_peer_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def meet(rank: int) -> None:
        rendezvous = Rendezvous(store, [0, 1], watch(rank), "test")
        if rank == 1:
            rendezvous.exchange("address", {"wire": 99, "host": "a", "secret": "00" * 16})
        else:
            connect_links(rendezvous, ["a", "a"], dial=[1], accept=[])

    error, _ = run_ranks(2, meet)
    assert isinstance(error, ConfigurationError)
    assert "Rank 1 speaks version 99" in str(error)


def test_a_wait_ends_at_the_timeout_with_who_and_what() -> None:
    with pytest.raises(
        PeerFailureError, match=r"Rank 0 waited for rank 4 in segment 3 of all-reduce 57 and heard nothing"
    ):
        watch(peer_timeout=0.01).check(0.0, "rank 4", "segment 3 of all-reduce 57")
