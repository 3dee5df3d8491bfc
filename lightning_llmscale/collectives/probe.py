"""How fast the links between ranks are: every pair measured once, many pairs at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_llmscale.collectives.links import Link, LinkClosedError, Rendezvous, Watch, connect_links
from lightning_llmscale.collectives.protocol import Group

__all__ = ["LinkSpeeds", "measure_links", "tournament"]

_PINGS = 5
_ENOUGH_SECONDS = 0.03
_SMALLEST, _LARGEST = 64 << 10, 16 << 20


@dataclass(frozen=True)
class LinkSpeeds:
    """What all ranks know after :func:`measure_links`, by position in the group; the diagonals are 0."""

    latency: list[list[float]]
    """Seconds of one way: half the median round trip of an empty message."""

    bandwidth: list[list[float]]
    """Bytes per second from ``i`` to ``j`` in ``bandwidth[i][j]``."""


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once and nobody plays twice in a round (the circle method).

    Returns:
        ``players - 1`` rounds of pairs, for an odd number ``players`` rounds in which one rests.
    """
    seats = list(range(players)) + ([-1] if players % 2 else [])
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_links(group: Group) -> LinkSpeeds:
    """Measure latency and bandwidth of every pair; each rank calls it and all get the same answer.

    Pairs of one round are measured at the same time, so links that share a cable show what they get when shared. About
    0.1 s per rank on links of 100 Mbit/s and less on faster ones; the time grows linearly with the number of ranks.

    Args:
        group: The ranks.

    Raises:
        PeerFailureError: A rank did not show up, died or was silent for too long.
    """
    rendezvous = Rendezvous(group.store, group.members, group.watch, "probe")
    position, watch = group.position, group.watch
    before, after = group.members[:position], group.members[position + 1 :]
    dialled, accepted = connect_links(rendezvous, group.hosts, dial=before, accept=after)
    links = {**dialled, **accepted}
    latency, bandwidth = [0.0] * group.size, [0.0] * group.size
    try:
        for pairs in tournament(group.size):
            pair = next((pair for pair in pairs if position in pair), None)
            if pair is None:
                continue
            peer = pair[0] if position == pair[1] else pair[1]
            meeting = _Meeting(links[group.members[peer]], watch)
            leads = position == pair[0]
            latency[peer] = meeting.ping() if leads else meeting.answer_pings()
            for sends in (leads, not leads):
                if sends:
                    bandwidth[peer] = meeting.send()
                else:
                    meeting.absorb()
        rows = rendezvous.exchange("speeds", {"latency": latency, "bandwidth": bandwidth})
    except LinkClosedError as error:
        raise watch.closed(error, "the measurement of links") from error
    finally:
        for link in links.values():
            link.close()
    symmetric = [
        [max(rows[i]["latency"][j], rows[j]["latency"][i]) for j in range(group.size)] for i in range(group.size)
    ]
    return LinkSpeeds(symmetric, [row["bandwidth"] for row in rows])


class _Meeting:
    """Two ranks that measure the link between them."""

    def __init__(self, link: Link, watch: Watch) -> None:
        self._link = link
        self._watch = watch
        self._byte = memoryview(bytearray(1))
        self._size = memoryview(bytearray(8))
        self._buffer = memoryview(bytearray(1 << 20))

    def ping(self) -> float:
        times = []
        for _ in range(_PINGS):
            started = time.perf_counter()
            self._say(b"p")
            self._hear(self._byte)
            times.append(time.perf_counter() - started)
        return statistics.median(times) / 2

    def answer_pings(self) -> float:
        for _ in range(_PINGS):
            self._hear(self._byte)
            self._say(b"p")
        return 0.0

    def send(self) -> float:
        """Send more and more until twice the same amount took long enough to tell; bytes per second of the faster one.

        Twice, because a single lost packet may stop a stream for longer than all the rest takes.
        """
        size = _SMALLEST
        while True:
            elapsed = self._timed(size)
            if elapsed >= _ENOUGH_SECONDS or size >= _LARGEST:
                elapsed = min(elapsed, self._timed(size))
                if elapsed >= _ENOUGH_SECONDS or size >= _LARGEST:
                    self._say(bytes(8))
                    return size / elapsed
            size *= 4

    def _timed(self, size: int) -> float:
        started = time.perf_counter()
        self._say(size.to_bytes(8, "big"))
        for offset in range(0, size, len(self._buffer)):
            self._say(self._buffer[: min(len(self._buffer), size - offset)])
        self._hear(self._byte)
        return time.perf_counter() - started

    def absorb(self) -> None:
        while True:
            self._hear(self._size)
            left = int.from_bytes(self._size, "big")
            if not left:
                return
            while left:
                part = self._buffer[: min(len(self._buffer), left)]
                self._hear(part)
                left -= len(part)
            self._say(b"a")

    def _say(self, data: bytes | memoryview) -> None:
        self._link.send(memoryview(data), self._tick())

    def _hear(self, target: memoryview) -> None:
        self._link.receive_into(target, self._tick())

    def _tick(self) -> Callable[[bool], None]:
        started = time.monotonic()
        return lambda progress: self._watch.check(started, f"rank {self._link.peer}", "the measurement of links")
