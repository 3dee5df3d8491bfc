"""What the roster concludes from arrivals, silence and the clock."""

from __future__ import annotations

import pytest

from lightning_llmscale.collectives.roster import Roster


@pytest.fixture
def roster() -> Roster:
    made = Roster(world_size=3, peer_timeout=10.0, wait_limit=100.0, deadlock_after=3.0)
    made.wake(0.0)
    for rank, member in enumerate(made.members):
        member.identity = f"pid {100 + rank} on host"
    return made


def test_the_last_arrival_completes_the_operation(roster: Roster) -> None:
    assert roster.arrive(1, "barrier", b"b", 0.0).payloads is None
    assert roster.arrive(0, "barrier", b"a", 0.1).payloads is None
    assert roster.arrive(2, "barrier", b"c", 0.2).payloads == [b"a", b"b", b"c"]
    assert roster.arrive(2, "next", b"", 0.3).payloads is None, "a completed operation leaves nothing behind"


def test_different_operations_part_the_ranks(roster: Roster) -> None:
    roster.arrive(0, "barrier 'x'", b"", 0.0)
    failure = roster.arrive(1, "reduction of 'val'", b"", 0.0).failure
    assert failure is not None
    assert "rank 0 is waiting in barrier 'x'" in failure
    assert "rank 1 is waiting in reduction of 'val'" in failure


def test_a_goodbye_fails_only_those_who_wait(roster: Roster) -> None:
    assert roster.leave(2, "has ended its program").failure is None
    failure = roster.arrive(0, "barrier 'save'", b"", 0.0).failure
    assert failure is not None
    assert "rank 2 (pid 102 on host) has ended its program while rank 0 waited in barrier 'save'" in failure


def test_a_broken_connection_is_a_death_unless_the_rank_had_left(roster: Roster) -> None:
    roster.report(1, "in training_step of batch 7", None, 0.0)
    failure = roster.lost(1).failure
    assert failure is not None
    assert "rank 1 (pid 101 on host) died; it was last in training_step of batch 7" in failure
    roster.leave(2, "has ended its program")
    assert roster.lost(2).failure is None


def test_silence_is_noticed_at_the_timeout_and_not_before(roster: Roster) -> None:
    roster.seen(1, 5.0)
    roster.seen(2, 5.0)
    assert roster.check(14.9).failure is None
    failure = roster.check(15.1).failure
    assert failure is not None
    assert "rank 1" in failure
    assert "silent for 10 s" in failure


def test_time_in_which_this_process_was_stopped_is_forgiven(roster: Roster) -> None:
    roster.wake(1000.0)
    assert roster.check(1001.0).failure is None


def test_a_deadlock_needs_every_rank_blocked_for_a_while(roster: Roster) -> None:
    for rank in (1, 2):
        roster.seen(rank, 9.0)
    roster.arrive(0, "barrier", b"", 0.0)
    roster.report(1, "in backward", "the all-reduce of gradients", 1.0)
    assert roster.check(9.0).failure is None, "rank 2 still works"
    roster.report(2, "in backward", "the all-reduce of gradients", 7.0)
    assert roster.check(9.0).failure is None, "rank 2 has not been blocked for long"
    failure = roster.check(10.1).failure
    assert failure is not None
    assert "deadlock: rank 0 is waiting in barrier, ranks 1 and 2 are waiting in the all-reduce" in failure


def test_ranks_stuck_in_different_places_outside_the_plane_are_a_deadlock_too(roster: Roster) -> None:
    for rank in range(3):
        roster.seen(rank, 9.0)
        roster.report(rank, "in a callback", "torch.distributed (all_reduce)", 2.0)
    assert roster.check(9.0).failure is None, "all in one place: a long transfer, perhaps"
    roster.report(1, "in a callback", "Lightning's signal check", 3.0)
    failure = roster.check(9.0).failure
    assert failure is not None
    assert "rank 1 is waiting in Lightning's signal check" in failure


def test_even_living_ranks_are_not_waited_for_without_end(roster: Roster) -> None:
    roster.arrive(1, "barrier", b"", 0.0)
    for rank in (1, 2):
        roster.seen(rank, 101.0)
    roster.report(2, "in a callback", None, 101.0)
    failure = roster.check(101.0).failure
    assert failure is not None
    assert "waited 101 s" in failure
    assert "rank 2 is in a callback" in failure
