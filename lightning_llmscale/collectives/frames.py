"""Messages on streams between ranks: numbered segments, heartbeats and farewells."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from lightning_llmscale.collectives.links import POLL_SECONDS, Link, LinkClosedError
from lightning_llmscale.errors import PeerFailureError

__all__ = ["FrameReader", "FrameSender"]

_FRAME = struct.Struct("!BxxxIIIQ")
"""Header of a message: kind, number of the all-reduce and of the segment, bytes that follow, bytes of the tensor."""

_FAREWELL_SECONDS = 0.3
_INLINE_BYTES = 32 << 10  # fits any socket buffer: sent at once by the caller, sparing the wake-up of the sender thread


class _Kind(IntEnum):
    """What a message is: a segment, the sign of a live but waiting peer, or why the peer leaves."""

    DATA = 0
    HEARTBEAT = 1
    FAREWELL = 2


class FrameSender:
    """A thread that writes messages in order, so that receiving and adding never wait for a full socket.

    Args:
        links: Where to; only this object writes to them.
        heartbeat_seconds: Interval of heartbeats while :meth:`heartbeats` is active and nothing else is sent.
    """

    def __init__(self, links: Sequence[Link], *, heartbeat_seconds: float) -> None:
        self.error: LinkClosedError | None = None
        self._links = links
        self._interval = heartbeat_seconds
        self._queue: queue.SimpleQueue[tuple[Link, bytes, memoryview] | None] = queue.SimpleQueue()
        self._unsent = 0
        self._changed = threading.Condition()
        self._beating = 0
        self._closing = False
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="llmscale-sender", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether messages wait to be sent."""
        return self._unsent > 0

    def put(self, link: Link, payload: memoryview, *, operation: int, segment: int, total_bytes: int) -> None:
        """Send a segment; the payload's memory must stay unchanged until the peer is known to have it.

        Args:
            link: Where to.
            payload: The bytes.
            operation: Number of the all-reduce.
            segment: Number of the segment in this link's part of it.
            total_bytes: Size of the tensor that is reduced.
        """
        header = _FRAME.pack(_Kind.DATA, operation, segment, len(payload), total_bytes)
        with self._changed:
            if self._unsent == 0 and len(payload) <= _INLINE_BYTES and self.error is None:
                header, payload = _send_now(link, b"".join((header, payload)))
                if not header:
                    return
            self._unsent += 1
        self._queue.put((link, header, payload))

    def flush(self, tick: Callable[[], None]) -> None:
        """Wait until all is handed to the kernel.

        Args:
            tick: Called every poll interval; raises to give up.

        Raises:
            LinkClosedError: The peer closed its end before.
        """
        with self._changed:
            while self._unsent and self.error is None:
                if not self._changed.wait(POLL_SECONDS):
                    tick()
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """While the body runs, tell peers now and then that this rank takes part and waits itself; may be nested."""
        with self._changed:
            self._beating += 1
        try:
            yield
        finally:
            with self._changed:
                self._beating -= 1

    def _run(self) -> None:
        while True:
            try:
                message = self._queue.get(timeout=self._interval)
            except queue.Empty:
                self._beat()
                continue
            if message is None:
                return
            link, header, payload = message
            try:
                # After a loss the rest of the all-reduce is moot, but not the farewells to those who are still there.
                if self.error is None or (self._closing and link.peer != self.error.peer):
                    link.send(memoryview(header), self._tick, more=len(payload) > 0)
                    link.send(payload, self._tick)
            except LinkClosedError as error:
                self.error = self.error or error
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    def _beat(self) -> None:
        with self._changed:
            if not self._beating or self._unsent or self.error is not None:
                return
            for link in self._links:
                rest, _ = _send_now(link, _FRAME.pack(_Kind.HEARTBEAT, 0, 0, 0, 0))
                if 0 < len(rest) < _FRAME.size:  # cut in the middle: the stream needs the other half; else drop it
                    self._unsent += 1
                    self._queue.put((link, rest, memoryview(b"")))

    def _tick(self, progress: bool) -> None:
        if self._aborted:
            raise LinkClosedError(-1)

    def close(self, reason: str) -> None:
        """Replace what is still queued by farewells, give them a moment to leave, and end the thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._closing = True
        words = reason.encode()
        for link in self._links:
            self._queue.put((link, _FRAME.pack(_Kind.FAREWELL, 0, 0, len(words), 0), memoryview(words)))
        self._queue.put(None)
        self._thread.join(_FAREWELL_SECONDS)
        self._aborted = True
        self._thread.join()


class FrameReader:
    """Reads the messages of one link in order.

    Args:
        link: The link; only this object reads from it.
        rank: This rank, for the messages.
    """

    def __init__(self, link: Link, rank: int) -> None:
        self.last_sign = time.monotonic()
        """When the peer last sent anything, or we last began to wait for it."""
        self._link = link
        self._rank = rank
        self._header = memoryview(bytearray(_FRAME.size))

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self._link.peer

    def receive(
        self, target: memoryview, tick: Callable[[], None], *, operation: int, segment: int, total_bytes: int
    ) -> None:
        """Receive the next segment straight into ``target``.

        Args:
            target: Filled exactly.
            tick: Called after each poll interval without completion; raises to give up.
            operation: Expected number of the all-reduce.
            segment: Expected number of the segment.
            total_bytes: Expected size of the tensor.

        Raises:
            LinkClosedError: The peer left; with its words if it left any.
            PeerFailureError: The peer sent another segment than the expected one.
        """

        def check(progress: bool) -> None:
            if progress:
                self.last_sign = time.monotonic()
            tick()

        self.last_sign = time.monotonic()
        while True:
            self._link.receive_into(self._header, check)
            kind, *found = _FRAME.unpack(self._header)
            if kind == _Kind.DATA:
                break
            if kind == _Kind.FAREWELL:
                words = memoryview(bytearray(found[2]))
                self._link.receive_into(words, check)
                raise LinkClosedError(self.peer, bytes(words).decode(errors="replace"))
            self.last_sign = time.monotonic()
        if found != [operation, segment, len(target), total_bytes]:
            raise PeerFailureError(
                f"Rank {self.peer} sent segment {found[1]} of all-reduce {found[0]} with {found[2]} of {found[3]} "
                f"bytes where rank {self._rank} expected segment {segment} of all-reduce {operation} with "
                f"{len(target)} of {total_bytes}: the ranks reduce different tensors, so their models differ."
            )
        self._link.receive_into(target, check)


def _send_now(link: Link, message: bytes) -> tuple[bytes, memoryview]:
    """Write what fits without waiting; return the rest, empty if none."""
    try:
        sent = link.socket.send(message, socket.MSG_DONTWAIT)
    except OSError:  # full, or gone: the sender thread finds out which
        sent = 0
    return message[sent:], memoryview(b"")
