"""The pool itself: ends of ranks are told apart, and nothing survives a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.leaks import Snapshot, zombie
from tests.support.pool import ROOT, RankPool, RanksFailed


def rank() -> int:
    return int(os.environ["RANK"])


def place() -> tuple[str | None, ...]:
    print("words of rank", rank())
    return tuple(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID"))


def collective() -> list[int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, rank())
    return everyone


def write_global(name: str) -> str | None:
    before = os.environ.get(name)
    os.environ[name] = "set"
    return before


def differ() -> str:
    if rank() == 1:
        raise FileNotFoundError("no such shard")
    return "fine"


def end_as_told(how: str) -> None:
    if rank() == 1:
        {"exit": lambda: sys.exit(3), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}[how]()


def sleep_on_rank_1() -> None:
    if rank() == 1:
        time.sleep(600)


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="forgotten").start()


def leave_process() -> None:
    subprocess.Popen(["sleep", "600"])


def test_ranks_look_as_if_torchrun_had_started_them(pool2: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first, second = pool2.run(place)
    assert first[:3] == ("0", "0", "2")
    assert second[:3] == ("1", "1", "2")
    assert first[3] == second[3] is not None
    assert first[4] is None
    assert [outcome.log for outcome in pool2.outcomes(place)] == ["words of rank 0\n", "words of rank 1\n"]


def test_collectives_work_and_no_call_sees_the_one_before(pool2: RankPool) -> None:
    assert pool2.run(collective) == [[0, 1], [0, 1]]
    assert pool2.run(collective) == [[0, 1], [0, 1]]
    assert pool2.run(write_global, "POOL_TEST") == [None, None]
    assert pool2.run(write_global, "POOL_TEST") == [None, None]


def test_exception_comes_back_with_its_rank_class_and_traceback(pool2: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 raised builtins.FileNotFoundError: no such shard") as failed:
        pool2.run(differ)
    fine, broken = failed.value.outcomes
    assert fine.value == "fine"
    assert broken.error is not None
    assert broken.error.is_a(OSError)
    assert not broken.error.is_a(ValueError)
    assert "in differ" in broken.error.traceback
    with pytest.raises(RanksFailed, match="did not raise on every rank"):
        pool2.errors(differ)


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_early_end_is_told_by_exit_code(pool2: RankPool, how: str, code: int) -> None:
    outcomes = pool2.outcomes(end_as_told, how)
    assert [outcome.exit_code for outcome in outcomes] == [0, code]
    assert pool2.run(place)[1][0] == "1"


def test_deadline_kills_and_shows_where_the_rank_hung(pool2: RankPool) -> None:
    started = time.monotonic()
    fine, hung = pool2.outcomes(sleep_on_rank_1, timeout=1.0)
    assert time.monotonic() - started < 30
    assert fine.ok
    assert hung.timed_out
    assert "in sleep_on_rank_1" in hung.log


@pytest.mark.parametrize(("function", "what"), [(leave_thread, "thread 'forgotten'"), (leave_process, "sleep 600")])
def test_threads_and_processes_left_behind_are_a_failure(pool1: RankPool, function: object, what: str) -> None:
    with pytest.raises(RanksFailed, match=what):
        pool1.run(function)  # type: ignore[arg-type]


def test_ranks_die_with_the_test_run(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"from tests.support import test_pool as t; t.RankPool(1).run(t.write_pid_and_sleep, {str(pid_file)!r})"
    # the run is killed and leaves its folder behind, so that goes where pytest removes it
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(pid_file.exists)
    pid = int(pid_file.read_text())
    assert not zombie(pid)
    run.kill()
    run.wait(10)
    wait_until(lambda: zombie(pid))


def write_pid_and_sleep(path: str) -> None:
    unfinished = Path(path + ".unfinished")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)
    time.sleep(600)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_police_finds_and_removes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.leaks.GRACE_SECONDS", 0.1)
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    child = subprocess.Popen(["sleep", "600"])
    os.environ["POOL_TEST"] = "set"
    leaks = before.leaks()
    stop.set()
    thread.join(10)
    child.wait(10)
    assert [leak.split("(")[0] for leak in leaks] == [
        "thread 'forgotten'",
        f"child process {child.pid} ",
        "environment variable POOL_TEST: None became 'set'",
    ]
    assert before.leaks() == []
