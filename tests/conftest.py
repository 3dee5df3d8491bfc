"""Fixtures for every test: worlds of processes, and the police for what a test leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.leaks import Snapshot
from tests.support.pool import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pool1() -> Iterator[RankPool]:
    """One process that looks as if torchrun had started it alone; also where plain Lightning is run as the oracle."""
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool2(pool1: RankPool) -> RankPool:
    """Two ranks; see :class:`tests.support.pool.RankPool`."""
    return RankPool(2, server=pool1)


@pytest.fixture(scope="session")
def pool4(pool1: RankPool) -> RankPool:
    """Four ranks: for what two cannot show, and for the long tier."""
    return RankPool(4, server=pool1)


@pytest.fixture(scope="session")
def plain_process(pool1: RankPool) -> RankPool:
    """One process that no launcher has touched, like a user's ``python script.py``."""
    return RankPool(1, server=pool1, launched=False)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """A test that leaves a thread, a child process, a shared memory segment, a variable or a process group fails."""
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
