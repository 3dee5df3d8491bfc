"""What a test must not leave behind in the process that runs it: threads, variables, processes, shared memory."""

from __future__ import annotations

__all__ = ["Snapshot"]

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 3.0
#: Threads and children that libraries start once per process and keep.
PERMANENT_THREADS = ("TMonitor",)
PERMANENT_CHILDREN = ("tests.support.forkserver", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: Variables that the test runner or the first import of a library sets.
PERMANENT_VARIABLES = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "CUBLAS_", "MPLCONFIGDIR", "COLUMNS", "LINES")


@dataclass(frozen=True)
class Snapshot:
    """State of the process before a test.

    Attributes:
        threads: Living threads.
        variables: Environment variables.
        children: Process ids of the children.
        segments: Names in ``/dev/shm``.
        process_group: Whether torch.distributed was initialised.
    """

    threads: frozenset[threading.Thread]
    variables: dict[str, str]
    children: frozenset[int]
    segments: frozenset[str]
    process_group: bool

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            threads=frozenset(threading.enumerate()),
            variables=dict(os.environ),
            children=frozenset(children()),
            segments=frozenset(segments()),
            process_group=process_group_exists(),
        )

    def leaks(self) -> list[str]:
        """What is there now and was not before, after a grace period; it is removed so that one test fails, not all."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (found := self._transient()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in set(children()) - self.children:
            if not permanent(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return [*found, *self._variables(), *self._process_group()]

    def _transient(self) -> list[str]:
        threads = [
            t for t in threading.enumerate() if t not in self.threads and type(t).__name__ not in PERMANENT_THREADS
        ]
        processes = [pid for pid in children() if pid not in self.children and not permanent(pid)]
        orphans = [name for name in segments() if name not in self.segments and not in_use(name)]
        return [
            *(f"thread {thread.name!r}" for thread in threads),
            *(f"child process {pid} ({command_line(pid)})" for pid in processes),
            *(f"shared memory segment /dev/shm/{name}" for name in orphans),
        ]

    def _variables(self) -> list[str]:
        now = dict(os.environ)
        names = [
            name
            for name in {**now, **self.variables}
            if now.get(name) != self.variables.get(name) and not name.startswith(PERMANENT_VARIABLES)
        ]
        for name in names:
            if name in self.variables:
                os.environ[name] = self.variables[name]
            else:
                del os.environ[name]
        return [f"environment variable {name}: {self.variables.get(name)!r} became {now.get(name)!r}" for name in names]

    def _process_group(self) -> list[str]:
        if self.process_group or not process_group_exists():
            return []
        sys.modules["torch"].distributed.destroy_process_group()
        return ["a torch.distributed process group"]


def process_group_exists() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def children() -> list[int]:
    """Living children of this process, zombies not counted."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in task.read_text().split()]
    return [pid for pid in found if not zombie(pid)]


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return ""


def permanent(pid: int) -> bool:
    return any(name in command_line(pid) for name in PERMANENT_CHILDREN)


def segments() -> list[str]:
    """Names in /dev/shm, without semaphores: multiprocessing's resource tracker removes those in its own time."""
    try:
        return [name for name in os.listdir("/dev/shm") if not name.startswith("sem.")]
    except OSError:
        return []


def in_use(name: str) -> bool:
    """Whether a living process maps or holds open the segment: then it belongs to somebody else's run."""
    path = f"/dev/shm/{name}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path in (process / "maps").read_text():
                return True
            if any(os.readlink(fd) == path for fd in (process / "fd").iterdir()):
                return True
    return False
