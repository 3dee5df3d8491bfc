"""Run a function on every rank of a small world, for tests that need real processes.

``pool.run(function, *args)`` calls an importable (module-level) function once per rank, in processes that look as if
torchrun had started them: Lightning launches nothing itself and finds its place in the environment variables. Every
call has its own processes, port, working folder and deadline.
"""

from __future__ import annotations

__all__ = ["Outcome", "RankPool", "RanksFailed", "RemoteError", "free_port"]

import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.forkserver import Ended, Report, Request

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
LOG_LINES = 60


def free_port() -> int:
    """A port nobody listens on, below the range from which the kernel serves outgoing connections."""
    for port in random.Random(uuid.uuid4().int).sample(range(15000, 32000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port among 50 tried between 15000 and 32000")


@dataclass(frozen=True)
class RemoteError:
    """An exception raised on a rank.

    Attributes:
        classes: Qualified names of the exception's class and its bases, most derived first.
        message: ``str(exception)``.
        traceback: The formatted traceback.
    """

    classes: tuple[str, ...]
    message: str
    traceback: str

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether the exception is an instance of ``kind``."""
        return f"{kind.__module__}.{kind.__qualname__}" in self.classes


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        rank: Global rank.
        value: What the function returned, None if it did not return.
        error: The exception it raised, if it did.
        exit_code: Exit code of the process, negative for a signal.
        timed_out: The deadline passed and the process was killed.
        seconds: Life of the process.
        log: What the process wrote to stdout and stderr.
        leaks: Threads and processes left behind when the function had returned.
    """

    rank: int
    value: Any
    error: RemoteError | None
    exit_code: int | None
    timed_out: bool
    seconds: float
    log: str
    leaks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code == 0 and not self.timed_out and not self.leaks

    def __str__(self) -> str:
        if self.timed_out:
            state = "killed at the deadline (stacks are in its output)"
        elif self.error is not None:
            state = f"raised {self.error.classes[0]}: {self.error.message}"
        elif self.exit_code:
            state = f"ended with exit code {self.exit_code}"
        else:
            state = f"left behind {', '.join(self.leaks)}" if self.leaks else "returned"
        tail = "\n".join(self.log.splitlines()[-LOG_LINES:])
        return f"--- rank {self.rank} {state} after {self.seconds:.1f} s ---\n{tail}"


class RanksFailed(AssertionError):
    """Some rank did not do what the test expects; the message shows every rank's end and output."""

    def __init__(self, what: str, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join([what, *(str(outcome) for outcome in outcomes)]))
        self.outcomes = outcomes


class _Server:
    """The fork server of a test run, started on first use and again if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, request: Request) -> list[Ended]:
        connection = self._started()
        try:
            connection.send_bytes(pickle.dumps(request))
            if not connection.poll(START_SECONDS + request.timeout):
                raise TimeoutError("the fork server does not answer")
            return pickle.loads(connection.recv_bytes())
        except BaseException:  # also the deadline of the test itself: no rank may outlive it
            self.close()
            raise

    def _started(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "tests.support.forkserver", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            self._connection = Connection(ours.detach())
        return self._connection

    def close(self) -> None:
        """End the server and with it every rank; wait until it is gone."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class RankPool:
    """Calls functions on ``world_size`` ranks; see the module docstring.

    Args:
        world_size: Number of ranks.
        server: Share the fork server of another pool; by default a pool has its own.
        launched: Whether the ranks look as if torchrun had started them; else nothing tells them of any launcher.
    """

    def __init__(self, world_size: int, server: RankPool | None = None, *, launched: bool = True) -> None:
        self.world_size, self._launched = world_size, launched
        self._server = server._server if server is not None else _Server()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; the next call would start new ones."""
        self._server.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Args:
            function: A function that can be imported, so at module level.
            args: Its arguments, pickled; the same on every rank (``RANK`` is in the environment).
            timeout: Seconds until the ranks are killed.
            env: Environment variables to add.

        Returns:
            What each rank returned, by rank.

        Raises:
            RanksFailed: A rank raised, ended early, ran into the deadline, or left a thread or process behind.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, env=env)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(f"{function.__qualname__} failed", outcomes)
        return [outcome.value for outcome in outcomes]

    def errors(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[RemoteError]:
        """Call a function that must raise on every rank, and return the exceptions by rank.

        Raises:
            RanksFailed: A rank returned, ended without an exception, or ran into the deadline.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, env=env)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None and not outcome.timed_out]
        if len(errors) < len(outcomes):
            raise RanksFailed(f"{function.__qualname__} did not raise on every rank", outcomes)
        return errors

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[Outcome]:
        """Call a function of which any end is acceptable, and say how each rank ended."""
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        try:
            port = str(free_port())
            request = Request(
                payload=pickle.dumps((function, args)),
                module=function.__module__,
                path=list(sys.path),
                environments=[{**self._environment(rank, port), **(env or {})} for rank in range(self.world_size)],
                folder=str(folder),
                timeout=timeout,
            )
            ended = self._server.call(request)
            return [_outcome(rank, end, folder) for rank, end in enumerate(ended)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        if not self._launched:
            return {"OMP_NUM_THREADS": "1"}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "tests",
            "OMP_NUM_THREADS": "1",
        }


def _outcome(rank: int, end: Ended, folder: Path) -> Outcome:
    written = folder / f"{rank}.pickle"
    report: Report = pickle.loads(written.read_bytes()) if written.exists() else Report()
    log = folder / f"{rank}.log"
    leaks = report.leaks
    if end.left_behind and not end.timed_out:
        leaks += (f"process {end.left_behind!r}",)
    return Outcome(
        rank=rank,
        value=report.value,
        error=RemoteError(*report.error) if report.error is not None else None,
        exit_code=end.exit_code,
        timed_out=end.timed_out,
        seconds=end.seconds,
        log=log.read_text(errors="replace") if log.exists() else "",
        leaks=leaks,
    )
