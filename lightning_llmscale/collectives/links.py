"""Point-to-point byte streams between ranks: how they find each other, wait with a deadline and learn of a death.

A :class:`Link` is one connected socket to one peer. No wait on it is unbounded: every :data:`POLL_SECONDS` it calls
back, so that its owner can look at the rest of the world (:class:`Watch`). A peer that dies closes its links (the
kernel does it
for a killed process), and a rank that gives up says why in a *farewell* before it closes its own, so the cause travels
through the whole group within milliseconds instead of each rank blaming its neighbour.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store

from lightning_llmscale.errors import ConfigurationError, PeerFailureError

__all__ = ["POLL_SECONDS", "Link", "LinkClosedError", "Listener", "Rendezvous", "Watch", "connect_links"]

POLL_SECONDS = 0.1
"""Longest time any wait goes without looking whether a peer is known dead or silent for too long."""

_WIRE_VERSION = 1
_HELLO = struct.Struct("!16sI")
_SIOCGIFADDR = 0x8915
_TEST_NET = (
    "192.0.2.1"  # RFC 5737: never routed; connecting a datagram socket sends nothing, it only picks a local address
)


class LinkClosedError(Exception):
    """The peer's end of a link is gone; ``farewell`` holds its last words if it had time for any."""

    def __init__(self, peer: int, farewell: str | None = None) -> None:
        super().__init__(f"rank {peer} closed its connection")
        self.peer = peer
        self.farewell = farewell


@dataclass(frozen=True)
class Watch:
    """What a waiting rank looks at besides its own link.

    Args:
        rank: This rank, for the messages.
        peer_timeout: Seconds of silence after which a peer counts as lost.
        failure: Returns a sentence once some peer is known dead by other means, else ``None``; polled while waiting.
    """

    rank: int
    peer_timeout: float
    failure: Callable[[], str | None]

    def check(self, quiet_since: float, peers: str, doing: str) -> None:
        """Look once.

        Args:
            quiet_since: :func:`time.monotonic` when the awaited peers last gave a sign of life.
            peers: Who is awaited, as ``"rank 2"``.
            doing: What this rank needs from them, as ``"segment 3 of all-reduce 57"``.

        Raises:
            PeerFailureError: A peer is known dead, or the awaited ones were silent for ``peer_timeout``.
        """
        sentence = self.failure()
        if sentence is not None:
            raise PeerFailureError(f"{sentence} (rank {self.rank} was waiting for {peers} in {doing})")
        silence = time.monotonic() - quiet_since
        if silence > self.peer_timeout:
            raise PeerFailureError(
                f"Rank {self.rank} waited for {peers} in {doing} and heard nothing for {silence:.1f} s: it is stalled, "
                f"unplugged or busy elsewhere; raise peer_timeout (now {self.peer_timeout:g} s) if steps take so long."
            )

    def check_open(self, closed: bool, doing: str) -> None:
        """Refuse to go on with ``doing`` once this rank itself has closed its reducer.

        Raises:
            PeerFailureError: It has.
        """
        if closed:
            raise PeerFailureError(f"Rank {self.rank} has closed its own reducer and so cannot do {doing}.")

    def closed(self, error: LinkClosedError, doing: str) -> PeerFailureError:
        """Say what the end of a link means: the peer's own words if it left any, else that it died."""
        prefix = f"Rank {self.rank} waited for rank {error.peer} in {doing}"
        if error.farewell:
            return PeerFailureError(f"{prefix}; rank {error.peer} left: {error.farewell}")
        return PeerFailureError(
            f"{prefix}: rank {error.peer} closed the connection, so it died or left; its log holds the first error."
        )


class Link:
    """A connected stream socket to ``peer``; blocking calls return to ``tick`` every :data:`POLL_SECONDS`."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.socket = sock
        self.peer = peer
        sock.setblocking(True)
        # Kernel timeouts rather than settimeout(): Python's own would poll() before each call and break MSG_WAITALL.
        interval = struct.pack("ll", 0, int(POLL_SECONDS * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive_into(self, view: memoryview, tick: Callable[[bool], None]) -> None:
        """Fill ``view`` exactly.

        Args:
            view: Writable bytes.
            tick: Called after each poll interval that did not complete ``view``, with whether bytes arrived in it.

        Raises:
            LinkClosedError: The peer closed its end.
        """
        got, size = 0, len(view)
        while got < size:
            try:
                count = self.socket.recv_into(view[got:], size - got, socket.MSG_WAITALL)
            except BlockingIOError:
                tick(False)
                continue
            except OSError as error:
                raise LinkClosedError(self.peer) from error
            if count == 0:
                raise LinkClosedError(self.peer)
            got += count
            if got < size:
                tick(True)

    def send(self, view: memoryview, tick: Callable[[bool], None], *, more: bool = False) -> None:
        """Send all of ``view``; ``more`` tells the kernel that further bytes follow at once.

        Raises:
            LinkClosedError: The peer closed its end.
        """
        sent, flags = 0, socket.MSG_MORE if more and hasattr(socket, "MSG_MORE") else 0
        while sent < len(view):
            try:
                sent += self.socket.send(view[sent:], flags)
            except BlockingIOError:
                tick(False)
                continue
            except OSError as error:
                raise LinkClosedError(self.peer) from error

    def poll(self, limit: int = 1 << 16) -> bytes | None:
        """Whatever has arrived, without waiting: ``None`` if nothing, ``b""`` if the peer closed its end."""
        try:
            return self.socket.recv(limit, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close both directions; also wakes a thread of ours that is blocked in this link."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Rendezvous:
    """One meeting of some ranks through a store, under a prefix no earlier meeting used.

    Args:
        store: A store that all members reach.
        members: Global ranks of those who meet.
        watch: Ends the waits; also knows which rank this is.
        purpose: Names the meeting; ranks with different purposes or members never meet.
    """

    def __init__(self, store: Store, members: Sequence[int], watch: Watch, purpose: str) -> None:
        self.members = members
        self.watch = watch
        self.purpose = purpose
        place = f"llmscale/{purpose}/{'-'.join(map(str, members))}"
        # Counted in the store, not in the process: a restarted process continues the count of its rank.
        generation = store.add(f"{place}/opened-by/{watch.rank}", 1)
        self._store = PrefixStore(f"{place}/{generation}", store)

    def exchange(self, topic: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Publish this rank's ``record`` and return those of all members, in their order.

        Raises:
            PeerFailureError: A rank did not publish within ``peer_timeout``, or is known dead.
        """
        self._store.set(f"{topic}/{self.watch.rank}", json.dumps(record))
        return [json.loads(self._get(topic, member)) for member in self.members]

    def _get(self, topic: str, peer: int) -> bytes:
        key, started = f"{topic}/{peer}", time.monotonic()
        while True:
            try:
                self._store.wait([key], timedelta(seconds=POLL_SECONDS))
                return self._store.get(key)
            except DistStoreError:
                self.watch.check(started, f"rank {peer}", f"the {topic} exchange that opens the {self.purpose}")


class Listener:
    """A listening socket with a secret, and the address record that lets peers dial it.

    Peers on the same machine use a Unix socket in the abstract namespace (nothing to leave behind on disk), others TCP
    on the interface of ``GLOO_SOCKET_IFNAME``, or on the one that leads to ``MASTER_ADDR``.
    """

    def __init__(self, host: str, hosts: Sequence[str], backlog: int) -> None:
        self._secret = secrets.token_bytes(16)
        self._sockets: list[socket.socket] = []
        self.address: dict[str, Any] = {"wire": _WIRE_VERSION, "host": host, "secret": self._secret.hex()}
        if sys.platform == "linux" and sum(other == host for other in hosts) > 1:
            name = f"llmscale-{secrets.token_hex(16)}"
            self._listen(socket.AF_UNIX, "\0" + name, backlog)
            self.address["unix"] = name
        if any(other != host for other in hosts) or sys.platform != "linux":
            interface = _reachable_address(single_host=len(set(hosts)) == 1)
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            listener = self._listen(family, (interface, 0), backlog)
            self.address["tcp"] = list(listener.getsockname()[:2])

    def _listen(self, family: socket.AddressFamily, address: Any, backlog: int) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(sock)
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
        return sock

    def accept(self, expected: Sequence[int], watch: Watch, purpose: str) -> dict[int, Link]:
        """Accept one link from each expected rank; strangers without the secret are turned away.

        Raises:
            PeerFailureError: An expected rank did not connect within ``peer_timeout``, or is known dead.
        """
        links: dict[int, Link] = {}
        quiet_since = time.monotonic()
        while len(links) < len(expected):
            ready, _, _ = select.select(self._sockets, [], [], POLL_SECONDS)
            for listener in ready:
                sock, _ = listener.accept()
                peer = self._greet(sock)
                if peer is not None and peer in expected and peer not in links:
                    links[peer] = Link(sock, peer)
                    quiet_since = time.monotonic()
                else:
                    sock.close()
            if not ready:
                missing = ", ".join(str(rank) for rank in expected if rank not in links)
                try:
                    watch.check(quiet_since, f"rank {missing}", f"connecting the {purpose}")
                except PeerFailureError:
                    for link in links.values():
                        link.close()
                    raise
        return links

    def _greet(self, sock: socket.socket) -> int | None:
        sock.settimeout(2.0)
        try:
            secret, peer = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            return None
        return int(peer) if secrets.compare_digest(secret, self._secret) else None

    def close(self) -> None:
        """Stop listening; accepted links live on."""
        for sock in self._sockets:
            sock.close()


def connect_links(
    rendezvous: Rendezvous, hosts: Sequence[str], *, dial: Sequence[int], accept: Sequence[int]
) -> tuple[dict[int, Link], dict[int, Link]]:
    """Connect this rank to its neighbours.

    Args:
        rendezvous: The meeting all members attend.
        hosts: Machine name of each member; members with equal names use Unix sockets.
        dial: Global ranks this one connects to.
        accept: Global ranks that connect to this one (whose ``dial`` holds this rank).

    Returns:
        The dialled and the accepted links, by global rank.

    Raises:
        ConfigurationError: A rank runs another version of this wire.
        PeerFailureError: A neighbour did not show up within ``peer_timeout``, or is known dead.
    """
    watch, purpose = rendezvous.watch, rendezvous.purpose
    own_host = hosts[list(rendezvous.members).index(watch.rank)]
    listener = Listener(own_host, hosts, backlog=max(1, len(accept)))
    dialled: dict[int, Link] = {}
    try:
        addresses = dict(zip(rendezvous.members, rendezvous.exchange("address", listener.address), strict=True))
        for peer, address in addresses.items():
            if address["wire"] != _WIRE_VERSION:
                raise ConfigurationError(
                    f"Rank {peer} speaks version {address['wire']} of the collective wire and rank {watch.rank} "
                    f"version {_WIRE_VERSION}; install the same lightning_llmscale everywhere."
                )
        for peer in dial:
            dialled[peer] = Link(_dial(addresses[peer], own_host, peer, watch, purpose), peer)
            dialled[peer].socket.sendall(_HELLO.pack(bytes.fromhex(addresses[peer]["secret"]), watch.rank))
        return dialled, listener.accept(accept, watch, purpose)
    except BaseException:
        for link in dialled.values():
            link.close()
        raise
    finally:
        listener.close()


def _dial(address: Mapping[str, Any], own_host: str, peer: int, watch: Watch, purpose: str) -> socket.socket:
    target: Any
    if address["host"] == own_host and "unix" in address:
        family, target = socket.AF_UNIX, "\0" + address["unix"]
    else:
        target = tuple(address["tcp"])
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    started = time.monotonic()
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
        while not select.select([], [sock], [], POLL_SECONDS)[1]:
            watch.check(started, f"rank {peer}", f"connecting the {purpose} to {target}")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise PeerFailureError(
                f"Rank {watch.rank} cannot connect the {purpose} to rank {peer} at {target}: {os.strerror(code)}; "
                "set GLOO_SOCKET_IFNAME to the network interface that all hosts share."
            )
    except BaseException:
        sock.close()
        raise
    return sock


def _reachable_address(*, single_host: bool) -> str:
    """The address of this machine that peers can dial."""
    if single_host:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _interface_address(interface)
    candidates = [_local_address_towards(target) for target in (os.environ.get("MASTER_ADDR"), _TEST_NET) if target]
    found = [address for address in candidates if address is not None]
    # A loopback answer (Debian maps the own host name to 127.0.1.1) is of no use to other machines.
    return next((address for address in found if not address.startswith(("127.", "::1"))), "127.0.0.1")


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ConfigurationError(
                f"GLOO_SOCKET_IFNAME names the network interface {interface!r}, which has no IPv4 address here: "
                f"{error.strerror}; `ip -br address` lists the interfaces."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _local_address_towards(target: str) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return None
