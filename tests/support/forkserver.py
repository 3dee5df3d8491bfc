"""The process that test ranks are forked from: it has imported torch and Lightning once and runs nothing itself.

A forked rank costs some 20 ms where a fresh interpreter costs four seconds, and it is as good as a fresh process: no
state of one test reaches the next, and a rank that is killed or hangs leaves nothing to repair. Requests come one at a
time over an inherited socket (see :mod:`tests.support.pool`). When the other end of the socket closes, because the test
run ended or was killed, every rank is killed and the server ends.

Run as ``python -m tests.support.forkserver FD``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",  # imported by the first optimizer otherwise, for more than a second
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    "torchmetrics",
    "lightning.pytorch",
    "lightning.pytorch.tuner",
    "lightning_llmscale",
)

#: Variables by which a launcher (torchrun, SLURM, Lightning itself) tells a process its place; a rank gets fresh ones.
LAUNCHER_PREFIXES = ("SLURM_", "PL_", "TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_")
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 0.5
THREAD_GRACE_SECONDS = 3.0
DESCENDANT_GRACE_SECONDS = 2.0
#: Once per process: the monitor of tqdm, and the control plane of a strategy, which lives as long as the process group.
PERMANENT_THREADS = ("TMonitor", "llmscale-control")


@dataclass(frozen=True)
class Request:
    """One call of a function on every rank.

    Args:
        payload: Pickled ``(function, args)``.
        module: Module of the function; imported once in the server.
        path: ``sys.path`` of the test run.
        environments: One mapping of variables per rank.
        folder: Working folder of the ranks; rank ``r`` writes ``r.log`` and ``r.pickle`` there.
        timeout: Seconds until every rank still running is killed.
    """

    payload: bytes
    module: str
    path: list[str]
    environments: list[dict[str, str]]
    folder: str
    timeout: float


@dataclass
class Ended:
    """How the process of one rank ended."""

    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = 0.0
    left_behind: str = ""


@dataclass(frozen=True)
class Report:
    """What a rank writes when its function returned or raised."""

    value: Any = None
    error: tuple[tuple[str, ...], str, str] | None = None
    leaks: tuple[str, ...] = ()


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOAD:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request: Request = pickle.loads(connection.recv_bytes())
            sys.path[:] = request.path
            with contextlib.suppress(Exception):  # a rank will meet the same error and report it
                importlib.import_module(request.module)
            connection.send_bytes(pickle.dumps(serve(request, connection)))


def serve(request: Request, connection: Connection) -> list[Ended]:
    """Fork the ranks and wait until all have ended or were killed."""
    started = time.monotonic()
    pids: dict[int, int] = {}
    for rank in range(len(request.environments)):
        pid = os.fork()
        if pid == 0:
            connection.close()
            run_rank(request, rank)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # also done by the child: whoever comes first
        pids[rank] = pid
    ended = [Ended() for _ in pids]
    try:
        wait(pids, ended, started, request.timeout, connection)
    finally:
        for rank, pid in pids.items():
            if ended[rank].exit_code == 0:
                wait_for_descendants(pid)
            ended[rank].left_behind = kill_group(pid)
    return ended


def wait(pids: dict[int, int], ended: list[Ended], started: float, timeout: float, connection: Connection) -> None:
    running = dict(pids)
    asked_for_stacks = False
    while running:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[rank]
                ended[rank].exit_code = os.waitstatus_to_exitcode(status)
                ended[rank].seconds = time.monotonic() - started
        if running and select.select([connection], [], [], 0.005)[0]:
            for pid in running.values():
                kill_group(pid)
            raise EOFError("the test run ended while ranks were running")
        elapsed = time.monotonic() - started
        if elapsed > timeout and not asked_for_stacks:
            asked_for_stacks = True
            for rank, pid in running.items():
                ended[rank].timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        elif elapsed > timeout + STACK_SECONDS:
            for pid in running.values():
                kill_group(pid)


def wait_for_descendants(pid: int) -> None:
    """Give helpers that end when they notice the end of their parent, as multiprocessing's, the time to do so."""
    deadline = time.monotonic() + DESCENDANT_GRACE_SECONDS
    while group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def group_members(pid: int) -> list[str]:
    """Command lines of the living members of a process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == pid and stat[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " ").strip()[:200])
    return found


def kill_group(pid: int) -> str:
    """Kill what is left of a rank's process group and return its command lines."""
    found = group_members(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return "; ".join(found)


def run_rank(request: Request, rank: int) -> NoReturn:
    """Body of a forked rank: become what torchrun would have started, call the function, report, end."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    os.chdir(request.folder)
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ.update(request.environments[rank])
    random.seed()
    sys.modules["numpy"].random.seed()
    before = set(threading.enumerate())
    code = 0
    try:
        function, args = pickle.loads(request.payload)
        value = function(*args)
        write_report(Report(value=value, leaks=leaked_threads(before)), rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # code under test may have exceptions of its own that are no Exception
        traceback.print_exc()
        write_report(Report(error=(class_names(error), str(error), traceback.format_exc())), rank)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """What the interpreter does at its end, except freeing memory, which takes a forked process 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def class_names(error: BaseException) -> tuple[str, ...]:
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__)


def leaked_threads(before: set[threading.Thread]) -> tuple[str, ...]:
    """Threads that the function started and that are still there after a grace period."""
    deadline = time.monotonic() + THREAD_GRACE_SECONDS
    while True:
        left = [thread for thread in threading.enumerate() if thread not in before]
        permanent = {kind: t for t in left for kind in PERMANENT_THREADS if kind in (t.name, type(t).__name__)}
        left = [thread for thread in left if thread not in permanent.values()]  # a second one of a kind is a leak
        if not left or time.monotonic() > deadline:
            return tuple(f"thread {t.name!r} ({'daemon' if t.daemon else 'not a daemon'})" for t in left)
        left[0].join(0.05)


def write_report(report: Report, rank: int) -> None:
    try:
        content = pickle.dumps(report)
    except Exception as error:
        content = pickle.dumps(Report(error=(class_names(error), f"the result cannot be pickled: {error}", "")))
    unfinished = Path(f"{rank}.unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(f"{rank}.pickle")


if __name__ == "__main__":
    # pickled classes must have one identity: that of the importable module, not of __main__
    importlib.import_module("tests.support.forkserver").main(int(sys.argv[1]))
