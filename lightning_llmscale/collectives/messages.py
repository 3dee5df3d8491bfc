"""Framed messages over one connection of the control plane."""

from __future__ import annotations

import socket
import struct
import threading
import time
from enum import IntEnum

from lightning_llmscale.errors import PeerFailureError

__all__ = ["LENGTH", "Kind", "Link", "dial", "join", "split"]

LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">BI")


class Kind(IntEnum):
    """What a message is."""

    OPERATION = 1
    RESULT = 2
    BEAT = 3
    FAIL = 4
    GOODBYE = 5
    ALARM = 6


class Link:
    """One framed connection. Sending is serialised; receiving belongs to the control thread."""

    def __init__(self, sock: socket.socket, rank: int, timeout: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout)
        self.sock, self.rank = sock, rank
        self._inbox = bytearray()
        self._lock = threading.Lock()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send one message whole."""
        with self._lock:
            self.sock.sendall(_HEADER.pack(kind, len(body)) + body)

    def receive(self) -> list[tuple[Kind, bytes]]:
        """Read what is there. Raises EOFError when the peer has closed."""
        chunk = self.sock.recv(1 << 20)
        if not chunk:
            raise EOFError
        self._inbox += chunk
        messages = []
        while len(self._inbox) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + length
            if len(self._inbox) < end:
                break
            messages.append((Kind(kind), bytes(self._inbox[_HEADER.size : end])))
            del self._inbox[:end]
        return messages


def join(parts: list[bytes]) -> bytes:
    """Several payloads as one."""
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def split(body: bytes) -> list[bytes]:
    """The payloads that `join` put together."""
    parts, start = [], 0
    while start < len(body):
        (length,) = LENGTH.unpack_from(body, start)
        start += LENGTH.size + length
        parts.append(body[start - length : start])
    return parts


def dial(hosts: list[str], port: int, timeout: float) -> socket.socket:
    """Connect to the first host that answers."""
    deadline, last = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        for host in hosts:
            try:
                return socket.create_connection((host, port), timeout=5.0)
            except OSError as error:
                last = f"{host}:{port}: {error}"
        time.sleep(0.2)
    raise PeerFailureError(f"rank 0 cannot be reached within {timeout:.0f} s ({last})")
