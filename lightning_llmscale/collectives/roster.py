"""Who has arrived at which collective, who is alive, and the sentence that says what went wrong.

A pure state machine without sockets or clocks: `control.ControlPlane` feeds it on rank 0 and acts on its verdicts.
Every rank performs the same sequence of blocking operations, so at most one is open at a time; two ranks that name
different operations have taken different ways through the program, which would otherwise be a silent hang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Member", "Roster", "Verdict"]

_REMEDY = "every rank must make the same calls in the same order"


@dataclass
class Member:
    """What rank 0 knows of one rank."""

    identity: str = ""
    """Process id and host, for messages."""
    doing: str = "starting"
    """The rank's own words for what its main thread does."""
    blocked: str | None = None
    """What its data plane has been waiting for without progress, if anything."""
    blocked_since: float = 0.0
    last_seen: float = 0.0
    left: str | None = None
    """How the rank left, once it has."""


@dataclass
class Verdict:
    """The outcome of an event: payloads by rank once all have arrived, or the reason of a failure."""

    payloads: list[bytes] | None = None
    failure: str | None = None


@dataclass
class _Arrival:
    tag: str
    payload: bytes
    time: float


@dataclass
class Roster:
    """Arrivals and health of all ranks.

    Args:
        world_size: Number of ranks.
        peer_timeout: Seconds of silence after which a rank counts as stopped or unplugged.
        wait_limit: Seconds after which even living ranks may no longer be waited for.
        deadlock_after: Seconds for which all ranks must have been blocked, in different places, to call it a deadlock.
    """

    world_size: int
    peer_timeout: float
    wait_limit: float
    deadlock_after: float = 3.0
    members: list[Member] = field(init=False)

    def __post_init__(self) -> None:
        self.members = [Member() for _ in range(self.world_size)]
        self._arrived: dict[int, _Arrival] = {}

    def seen(self, rank: int, now: float) -> None:
        """Note a sign of life."""
        self.members[rank].last_seen = now

    def report(self, rank: int, doing: str, blocked: str | None, now: float) -> None:
        """Note a heartbeat: what the rank does, and what its data plane is stuck in, if anything."""
        member = self.members[rank]
        if blocked != member.blocked:
            member.blocked, member.blocked_since = blocked, now
        member.doing = doing

    def arrive(self, rank: int, tag: str, payload: bytes, now: float) -> Verdict:
        """A rank enters the operation `tag`; the last one to arrive completes it."""
        self._arrived[rank] = _Arrival(tag, payload, now)
        self.members[rank].doing = f"waiting in {tag}"
        if len({arrival.tag for arrival in self._arrived.values()}) > 1:
            return Verdict(failure=f"the ranks have parted: {self.whereabouts()}; {_REMEDY}")
        for other, member in enumerate(self.members):
            if member.left is not None:
                return Verdict(failure=self._abandoned(other))
        if len(self._arrived) < self.world_size:
            return Verdict()
        payloads = [self._arrived[r].payload for r in range(self.world_size)]
        self._arrived.clear()
        for member in self.members:
            member.doing = f"on its way from {tag}"
        return Verdict(payloads=payloads)

    def leave(self, rank: int, how: str) -> Verdict:
        """A rank has left on purpose (`how`: "has ended its program"); a failure only if someone waits for it."""
        self.members[rank].left = how
        return Verdict(failure=self._abandoned(rank)) if self._arrived else Verdict()

    def lost(self, rank: int) -> Verdict:
        """A rank's connection broke without a word."""
        member = self.members[rank]
        if member.left is not None:
            return Verdict()
        member.left = "died"
        return Verdict(failure=f"rank {rank} ({member.identity}) died; it was last {member.doing}{self._waiters()}")

    def check(self, now: float) -> Verdict:
        """Look at the clock: silent ranks, waits without end, deadlocks between control and data plane."""
        for rank, member in enumerate(self.members):
            silence = now - member.last_seen
            if rank and member.left is None and silence > self.peer_timeout:
                return Verdict(
                    failure=f"rank {rank} ({member.identity}) has been silent for {silence:.0f} s: stopped, or its "
                    f"network is unplugged (peer_timeout={self.peer_timeout:g}); it was last {member.doing}"
                    f"{self._waiters()}"
                )
        first = min((arrival.time for arrival in self._arrived.values()), default=now)
        if now - first > self.wait_limit:
            return Verdict(failure=f"waited {now - first:.0f} s without success: {self.whereabouts()}; {_REMEDY}")
        if now - self._all_blocked_since(now) >= self.deadlock_after:
            return Verdict(failure=f"deadlock: {self.whereabouts()}; {_REMEDY}")
        return Verdict()

    def _all_blocked_since(self, now: float) -> float:
        """Since when every rank has been waiting, not all of them in one place; `now` if that is not so."""
        since, places = [], set()
        for rank, member in enumerate(self.members):
            arrival = self._arrived.get(rank)
            if arrival is None and member.blocked is None:
                return now
            since.append(member.blocked_since if arrival is None else arrival.time)
            places.add(member.blocked if arrival is None else arrival.tag)
        return max(since) if len(places) > 1 else now

    def long_wait(self, now: float) -> tuple[float, str] | None:
        """Seconds for which the open operation has been waiting and the sentence that says for whom, if one is open."""
        if not self._arrived:
            return None
        return now - min(a.time for a in self._arrived.values()), self.whereabouts()

    def wake(self, now: float) -> None:
        """Forgive the time in which this process itself was stopped."""
        for member in self.members:
            member.last_seen = now

    def _waiters(self) -> str:
        if not self._arrived:
            return ""
        tag = next(iter(self._arrived.values())).tag
        return f" while {_ranks(self._arrived)} waited in {tag}"

    def _abandoned(self, rank: int) -> str:
        return f"rank {rank} ({self.members[rank].identity}) {self.members[rank].left}{self._waiters()}; {_REMEDY}"

    def whereabouts(self) -> str:
        """What every rank is doing, in words."""
        places: dict[str, list[int]] = {}
        for rank, member in enumerate(self.members):
            if rank in self._arrived:
                place = f"waiting in {self._arrived[rank].tag}"
            elif member.blocked:
                place = f"waiting in {member.blocked}"
            else:
                place = member.doing
            places.setdefault(place, []).append(rank)
        return ", ".join(f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {p}" for p, ranks in places.items())


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > 8:
        return f"ranks {', '.join(map(str, listed[:8]))} and {len(listed) - 8} more"
    return f"ranks {', '.join(map(str, listed[:-1]))} and {listed[-1]}"
