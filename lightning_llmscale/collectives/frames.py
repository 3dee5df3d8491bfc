"""Messages on a stream between two ranks: numbered segments, heartbeats and farewells; a thread sends them."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum

from lightning_llmscale.collectives.links import POLL_SECONDS, Link, LinkClosedError

__all__ = ["FRAME", "FrameKind", "FrameSender"]

FRAME = struct.Struct("!BxxxIIIQ")
"""Header of a message: kind, number of the all-reduce and of the segment, bytes that follow, bytes of the tensor."""

_FAREWELL_SECONDS = 0.3
_INLINE_BYTES = 32 << 10  # fits any socket buffer: sent at once by the caller, sparing the wake-up of the sender thread


class FrameKind(IntEnum):
    """What a message is: a segment, the sign of a live but waiting peer, or why the peer leaves."""

    DATA = 0
    HEARTBEAT = 1
    FAREWELL = 2


class FrameSender:
    """A thread that writes messages to one link in order, so that receiving and adding never wait for a full socket.

    Args:
        link: Where to; used for writing by this object alone.
        heartbeat_seconds: Interval of heartbeats while :meth:`heartbeats` is active and nothing else is sent.
    """

    def __init__(self, link: Link, *, heartbeat_seconds: float) -> None:
        self.error: LinkClosedError | None = None
        self._link = link
        self._interval = heartbeat_seconds
        self._queue: queue.SimpleQueue[tuple[bytes, memoryview] | None] = queue.SimpleQueue()
        self._unsent = 0
        self._changed = threading.Condition()
        self._beating = False
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="llmscale-sender", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether messages wait to be sent."""
        return self._unsent > 0

    def put(self, header: bytes, payload: memoryview) -> None:
        """Send a message; the payload's memory must stay unchanged until :meth:`flush`."""
        with self._changed:
            if self._unsent == 0 and len(payload) <= _INLINE_BYTES and self.error is None:
                header, payload = self._send_now(b"".join((header, payload)))
                if not header:
                    return
            self._unsent += 1
        self._queue.put((header, payload))

    def _send_now(self, message: bytes) -> tuple[bytes, memoryview]:
        """Write what fits without waiting; return the rest, empty if none."""
        try:
            sent = self._link.socket.send(message, socket.MSG_DONTWAIT)
        except OSError:  # full, or gone: the thread finds out which
            sent = 0
        return message[sent:], memoryview(b"")

    def flush(self, tick: Callable[[bool], None]) -> None:
        """Wait until all is handed to the kernel.

        Args:
            tick: Called every poll interval; raises to give up.

        Raises:
            LinkClosedError: The peer closed its end before.
        """
        with self._changed:
            while self._unsent and self.error is None:
                if not self._changed.wait(POLL_SECONDS):
                    tick(False)
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """While the body runs, tell the peer now and then that this rank takes part and waits itself."""
        self._beating = True
        try:
            yield
        finally:
            self._beating = False

    def _run(self) -> None:
        while True:
            try:
                message = self._queue.get(timeout=self._interval)
            except queue.Empty:
                self._beat()
                continue
            if message is None:
                return
            try:
                if self.error is None:
                    header, payload = message
                    self._link.send(memoryview(header), self._tick, more=len(payload) > 0)
                    self._link.send(payload, self._tick)
            except LinkClosedError as error:
                self.error = error
            with self._changed:
                self._unsent -= 1
                self._changed.notify_all()

    def _beat(self) -> None:
        with self._changed:
            if self._beating and not self._unsent and self.error is None:
                rest, _ = self._send_now(FRAME.pack(FrameKind.HEARTBEAT, 0, 0, 0, 0))
                if 0 < len(rest) < FRAME.size:  # cut in the middle: the stream needs the other half; else drop it
                    self._unsent += 1
                    self._queue.put((rest, memoryview(b"")))

    def _tick(self, progress: bool) -> None:
        if self._aborted:
            raise LinkClosedError(self._link.peer)

    def close(self, reason: str) -> None:
        """Replace what is still queued by a farewell, give it a moment to leave, and end the thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        words = reason.encode()
        self._queue.put((FRAME.pack(FrameKind.FAREWELL, 0, 0, len(words), 0), memoryview(words)))
        self._queue.put(None)
        self._thread.join(_FAREWELL_SECONDS)
        self._aborted = True
        self._thread.join()
