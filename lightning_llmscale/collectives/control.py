"""Small, self-describing collectives between all ranks, and the channel by which a failure becomes known everywhere.

Gradients travel elsewhere. This plane carries the few bytes by which ranks agree (metrics, decisions, "is there
another batch?") and, beside them, heartbeats. Every operation names itself, so ranks that took different ways through
the program get an error in words instead of a hang; a rank that dies, raises, leaves or falls silent is named on all
others.

Shape: a star. Rank 0 keeps one TCP connection to each other rank and a `roster.Roster` that judges arrivals. One daemon
thread per process reads the connections and beats once a second; callers block on a condition. Connections prove
themselves with a token from the rendezvous store before a byte of theirs is interpreted.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import Store

from lightning_llmscale.collectives.messages import LENGTH, Kind, Link, dial, join, split
from lightning_llmscale.collectives.roster import Roster, Verdict
from lightning_llmscale.errors import PeerFailureError

__all__ = ["ControlPlane"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_TOKEN_BYTES = 32
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BEAT = 1.0  # seconds between heartbeats
_BLOCKED_AFTER = 2.0  # seconds without progress after which a data-plane wait is reported
_IN_TORCH_AFTER = 8.0  # the same inside torch, at most
_FRAMES = 3  # innermost frames of the main thread that are looked at
_STOPPED_AFTER = 5.0  # a longer pause of the control thread means this process itself was stopped


class ControlPlane:
    """Exchange of small payloads between all ranks, with failures in words.

    Args:
        store: Rendezvous store that all ranks share; only used while opening.
        rank: This process's rank.
        world_size: Number of ranks.
        address: Host name or address under which the other ranks reach rank 0.
        peer_timeout: Seconds of silence after which a rank counts as stopped or unplugged.
        wait_limit: Seconds after which a wait for living ranks ends in an error.
        on_failure: Called once, from the control thread, with the sentence that says what failed.

    Raises:
        PeerFailureError: If rank 0 or another rank does not connect within `peer_timeout` (at least 60 s).
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        address: str = "127.0.0.1",
        peer_timeout: float = 30.0,
        wait_limit: float = 1800.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.world_size, self.doing = rank, world_size, "starting"
        self._peer_timeout, self._on_failure = peer_timeout, on_failure
        self._roster = Roster(world_size, peer_timeout, wait_limit)
        self._links: dict[int, Link] = {}
        self._changed = threading.Condition(threading.RLock())
        self._result: list[bytes] | None = None
        self._failure: str | None = None
        self._gone: dict[int, str] = {}
        self._blocked: tuple[str, float, float] | None = None
        self._region: tuple[str, float] | None = None
        self._in_torch: tuple[str, float] | None = None
        self._closed = False
        if world_size == 1:
            return
        self._connect(store, address, max(60.0, peer_timeout))
        self._selector = selectors.DefaultSelector()
        for link in self._links.values():
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._serve, name="llmscale-control", daemon=True)
        self._thread.start()
        atexit.register(self.close, "has ended its program")

    # ---- the public side -------------------------------------------------------------------------------------

    def exchange(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Give `payload`, get everyone's, in rank order. Blocks until all ranks have entered the operation `tag`.

        Raises:
            PeerFailureError: If a rank is in another operation, has left, died or fallen silent.
        """
        if self.world_size == 1:
            return [payload]
        with self._changed:
            self._raise_if_failed(tag)
            self._result = None
            before, self.doing = self.doing, f"waiting in {tag}"
        try:
            if self.rank == 0:
                self._settle(self._locked(lambda: self._roster.arrive(0, tag, payload, time.monotonic())))
            else:
                name = tag.encode()
                self._tell(0, Kind.OPERATION, LENGTH.pack(len(name)) + name + payload)
            with self._changed:
                while self._result is None:
                    self._raise_if_failed(tag)
                    self._changed.wait(_BEAT)
                return self._result
        finally:
            self.doing = before

    def fail(self, sentence: str) -> None:
        """Let every rank know that this one cannot go on, and why."""
        if self.world_size > 1 and not self._closed:
            self._set_failure(sentence)

    def alarm(self, sentence: str) -> None:
        """End the run on all ranks for a reason that this rank noticed; rank 0 adds what every rank is doing."""
        if self.world_size == 1:
            self._set_failure(sentence)
        elif self.rank == 0:
            self._set_failure(f"{sentence}: {self._locked(self._roster.whereabouts)}")
        else:
            self._tell(0, Kind.ALARM, sentence.encode())

    def failure(self) -> str | None:
        """The sentence that says what failed, or None while all is well."""
        return self._failure

    def wait_for_failure(self, timeout: float) -> str | None:
        """Give the news of a failure `timeout` seconds to arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, timeout)
            return self._failure

    def waiting(self, what: str) -> Callable[[], str | None]:
        """A `failure` function for a data plane to poll while it waits for `what`; heartbeats tell of long waits."""

        def poll() -> str | None:
            now = time.monotonic()
            blocked = self._blocked
            continued = blocked is not None and blocked[0] == what and now - blocked[2] < 1.0
            self._blocked = (what, blocked[1] if blocked is not None and continued else now, now)
            return self._failure

        return poll

    @contextmanager
    def region(self, what: str) -> Iterator[None]:
        """Mark a blocking call of the main thread that this plane cannot end, so that heartbeats tell of long waits."""
        self._region = (what, time.monotonic())
        try:
            yield
        finally:
            self._region = None

    def current_region(self) -> str | None:
        """The marked call, or the collective of torch, that the main thread is in, if any."""
        region = self._region or self._in_torch
        return None if region is None else region[0]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self, how: str = "has closed its trainer") -> None:
        """Say goodbye and release thread and connections. Idempotent."""
        if self.world_size == 1 or self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for rank in list(self._links):
            self._tell(rank, Kind.GOODBYE, how.encode())
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _BEAT)
        self._selector.close()
        for link in self._links.values():
            link.sock.close()

    # ---- connecting ------------------------------------------------------------------------------------------

    def _connect(self, store: Store, address: str, timeout: float) -> None:
        # each rank counts its own openings, so that planes opened one after the other never meet
        generation = store.add(f"llmscale/control/openings/{self.rank}", 1)
        key = f"llmscale/control/{generation}"
        identity = f"pid {os.getpid()} on {socket.gethostname()}"
        if self.rank == 0:
            self._roster.members[0].identity = identity
            self._accept(store, key, "127.0.0.1" if address in _LOOPBACK else "", timeout)
        else:
            where = json.loads(store.get(key))
            sock = dial([address, where["host"]], where["port"], timeout)
            sock.sendall(bytes.fromhex(where["token"]) + LENGTH.pack(self.rank))
            link = Link(sock, 0, self._peer_timeout)
            link.send(Kind.BEAT, self._beat(identity))
            self._links[0] = link
            self._roster.members[0].identity = where["identity"]
        self._roster.wake(time.monotonic())

    def _accept(self, store: Store, key: str, interface: str, timeout: float) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((interface, 0), backlog=self.world_size) as server:
            host, port = socket.gethostname(), server.getsockname()[1]
            identity = self._roster.members[0].identity
            store.set(key, json.dumps({"host": host, "port": port, "token": token.hex(), "identity": identity}))
            deadline = time.monotonic() + timeout
            while len(self._links) < self.world_size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    sock, _ = server.accept()
                    sock.settimeout(5.0)
                    greeting = sock.recv(_TOKEN_BYTES + LENGTH.size, socket.MSG_WAITALL)
                except TimeoutError:
                    missing = sorted(set(range(1, self.world_size)) - set(self._links))
                    raise PeerFailureError(
                        f"ranks {missing} did not connect to rank 0 within {timeout:.0f} s; look at their output"
                    ) from None
                if len(greeting) < _TOKEN_BYTES + LENGTH.size or not secrets.compare_digest(greeting[:32], token):
                    sock.close()  # a stranger: not one of our ranks
                    continue
                (rank,) = LENGTH.unpack(greeting[_TOKEN_BYTES:])
                self._links[rank] = Link(sock, rank, self._peer_timeout)

    # ---- the control thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        last, next_beat, next_warning = time.monotonic(), 0.0, self._peer_timeout
        while not self._closed:
            for key, _ in self._selector.select(timeout=_BEAT / 4):
                self._read(key.data)
            now = time.monotonic()
            if now - last > _STOPPED_AFTER:
                with self._changed:
                    self._roster.wake(now)
            last = now
            if now >= next_beat:
                next_beat = now + _BEAT
                self._look_for_torch(now)
                for rank in list(self._links):
                    self._tell(rank, Kind.BEAT, self._beat())
            if self.rank == 0:
                next_warning = self._watch(now, next_warning)
            elif 0 not in self._gone and now - self._roster.members[0].last_seen > self._peer_timeout:
                self._set_failure(
                    f"rank 0 ({self._roster.members[0].identity}) has been silent for {self._peer_timeout:g} s: "
                    f"stopped, or the network is unplugged; it was last {self._roster.members[0].doing}"
                )

    def _watch(self, now: float, next_warning: float) -> float:
        with self._changed:
            self._roster.report(0, self.doing, self._long_blocked(now), now)
            verdict, wait = self._roster.check(now), self._roster.long_wait(now)
        self._settle(verdict)
        if wait is None:
            return self._peer_timeout
        if wait[0] > next_warning:
            log.warning("waiting for %.0f s: %s", *wait)
            return next_warning * 2
        return next_warning

    def _read(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (EOFError, OSError):
            self._selector.unregister(link.sock)
            if self.rank == 0:
                self._settle(self._locked(lambda: self._roster.lost(link.rank)))
            elif 0 not in self._gone:
                self._set_failure(f"rank 0 ({self._roster.members[0].identity}) died; it was last "
                                  f"{self._roster.members[0].doing}")  # fmt: skip
            return
        now = time.monotonic()
        self._locked(lambda: self._roster.seen(link.rank, now))
        for kind, body in messages:
            self._handle(link.rank, kind, body, now)

    def _handle(self, rank: int, kind: Kind, body: bytes, now: float) -> None:
        if kind is Kind.OPERATION:
            (length,) = LENGTH.unpack_from(body)
            start = LENGTH.size + length
            tag = body[LENGTH.size : start].decode()
            self._settle(self._locked(lambda: self._roster.arrive(rank, tag, body[start:], now)))
        elif kind is Kind.RESULT:
            with self._changed:
                self._result = split(body)
                self._changed.notify_all()
        elif kind is Kind.BEAT:
            beat = json.loads(body)
            with self._changed:
                self._roster.report(rank, beat["doing"], beat["blocked"], now)
                if "identity" in beat:
                    self._roster.members[rank].identity = beat["identity"]
        elif kind is Kind.FAIL:
            self._set_failure(body.decode(), origin=rank)
        elif kind is Kind.ALARM:
            self.alarm(body.decode())
        elif kind is Kind.GOODBYE:
            self._gone[rank] = body.decode()
            if self.rank == 0:
                self._settle(self._locked(lambda: self._roster.leave(rank, body.decode())))
            with self._changed:
                self._changed.notify_all()

    def _settle(self, verdict: Verdict) -> None:
        """Act on what the roster decided (rank 0 only)."""
        if verdict.failure is not None:
            self._set_failure(verdict.failure)
        elif verdict.payloads is not None:
            body = join(verdict.payloads)
            for rank in list(self._links):
                self._tell(rank, Kind.RESULT, body)
            with self._changed:
                self._result = verdict.payloads
                self._changed.notify_all()

    def _set_failure(self, sentence: str, origin: int | None = None) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = sentence
            self._changed.notify_all()
        for rank in list(self._links):
            if rank != origin:
                self._tell(rank, Kind.FAIL, sentence.encode())
        if self._on_failure is not None:
            self._on_failure(sentence)

    def _tell(self, rank: int, kind: Kind, body: bytes) -> None:
        try:
            self._links[rank].send(kind, body)
        except OSError:
            log.debug("rank %d cannot be told %s: its connection is gone, which the reader reports", rank, kind.name)

    def _beat(self, identity: str | None = None) -> bytes:
        beat = {"doing": self.doing, "blocked": self._long_blocked(time.monotonic())}
        return json.dumps(beat if identity is None else {**beat, "identity": identity}).encode()

    def _look_for_torch(self, now: float) -> None:
        """Note whether the main thread is inside torch.distributed, where users' own collectives wait unmarked."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        for _ in range(_FRAMES):
            if frame is None:
                break
            if "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/"):
                what = f"torch.distributed ({frame.f_code.co_name})"
                since = self._in_torch[1] if self._in_torch is not None else now
                self._in_torch = (what, since)
                return
            frame = frame.f_back
        self._in_torch = None

    def _long_blocked(self, now: float) -> str | None:
        region = self._region or self._in_torch
        # inside torch progress cannot be seen: a long transfer must not look like a wait too soon
        if region is not None and now - region[1] >= min(self._peer_timeout, _IN_TORCH_AFTER):
            return region[0]
        if self._blocked is None:
            return None
        what, since, polled = self._blocked
        return what if now - polled < 1.0 and polled - since >= _BLOCKED_AFTER else None

    def _raise_if_failed(self, tag: str) -> None:
        if self._failure is not None:
            raise PeerFailureError(self._failure)
        if self.rank and 0 in self._gone:
            raise PeerFailureError(f"rank 0 {self._gone[0]} while rank {self.rank} entered {tag}; every rank must "
                                   "make the same calls in the same order")  # fmt: skip
        if self._closed:
            raise PeerFailureError(f"rank {self.rank} entered {tag} after its connections were closed")

    def _locked(self, action: Callable[[], T]) -> T:
        with self._changed:
            return action()
