"""The ways in which processes start: the script run again, spawn, fork, torchrun; and launchers that disagree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_llmscale.strategies.catalog import STRATEGIES
from tests.conformance.harness import assert_same_weights
from tests.conformance.jobs import PLAIN, StrategySpec, fit, new_trainer
from tests.conformance.models import Mlp
from tests.multiprocess.launch_script import Scripted
from tests.support.forkserver import LAUNCHER_NAMES, LAUNCHER_PREFIXES
from tests.support.leaks import zombie
from tests.support.pool import ROOT, RankPool, free_port

SCRIPT = Path(__file__).with_name("launch_script.py")
SECONDS = 90.0

pytestmark = pytest.mark.parametrize("class_path", [entry.class_path for entry in STRATEGIES.values()])


@pytest.fixture(scope="module")
def one_process(pool1: RankPool) -> dict[str, Tensor]:
    """Weights after the same training in one process of plain Lightning."""
    return pool1.run(fit, PLAIN, Mlp)[0].weights


def start(
    class_path: str, folder: Path, mode: str = "train", devices: int = 2, options: dict[str, Any] | None = None,
    launcher: tuple[str, ...] = (),
) -> subprocess.Popen[str]:  # fmt: skip
    """Start the script in a session of its own, from an environment without traces of a launcher."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    arguments = [str(SCRIPT), class_path, json.dumps(options or {}), str(folder), str(devices), mode]
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the script and kill whatever is left of its session, also after a failed test."""
    try:
        return process.communicate(timeout=SECONDS)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))]


def test_script_started_by_hand(class_path: str, tmp_path: Path, one_process: dict[str, Tensor]) -> None:
    process = start(class_path, tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    ranks = results(tmp_path)
    assert [rank["place"] for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
    for rank in ranks:
        assert_same_weights(rank["weights"], one_process)


def test_torchrun(class_path: str, tmp_path: Path, one_process: dict[str, Tensor]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    process = start(class_path, tmp_path, launcher=torchrun)
    output = finish(process)
    assert process.returncode == 0, output
    ranks = results(tmp_path)
    assert [rank["place"] for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
    for rank in ranks:
        assert_same_weights(rank["weights"], one_process)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing_brings_weights_and_metrics_back(
    class_path: str, plain_process: RankPool, one_process: dict[str, Tensor], method: str, tmp_path: Path
) -> None:
    strategy = StrategySpec(class_path, {"start_method": method})
    weights, metrics, children = plain_process.run(fit_in_children, strategy, str(tmp_path), timeout=SECONDS)[0]
    assert_same_weights(weights, one_process)
    assert set(metrics) == {"loss"}
    assert children == 2


def fit_in_children(strategy: StrategySpec, folder: str) -> tuple[dict[str, Tensor], dict[str, float], int]:
    """Train in children of this process, and report what this process knows afterwards."""
    module = Scripted(Path(folder), "train")
    trainer = new_trainer(strategy, devices=2)
    trainer.fit(module)
    pids = {path.read_text() for path in Path(folder).glob("*.pid")} - {str(os.getpid())}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.state_dict(), metrics, len(pids)


def test_rank_that_raises_ends_the_whole_script(class_path: str, tmp_path: Path) -> None:
    process = start(class_path, tmp_path, "fail")
    output = finish(process)
    assert process.returncode not in (0, None), output
    assert "the sensor is on fire" in output
    assert "rank 1 raised ValueError" in output
    wait_until_gone(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_process_ends_the_whole_script(class_path: str, tmp_path: Path, killed: int) -> None:
    process = start(class_path, tmp_path, "endless")
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, process)
        os.kill(int((tmp_path / f"{killed}.pid").read_text()), signal.SIGKILL)
        wait_until_gone(tmp_path)
    finally:
        output = finish(process)
    assert process.returncode not in (0, None), output


def wait_until_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert pids
    wait_until(lambda: all(zombie(pid) for pid in pids))


def wait_until(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def fit_on(strategy: StrategySpec, devices: int) -> None:
    new_trainer(strategy, devices=devices).fit(Mlp())


def test_devices_that_do_not_match_torchrun(class_path: str, pool2: RankPool) -> None:
    for error in pool2.errors(fit_on, StrategySpec(class_path), 3, timeout=SECONDS):
        assert "2" in error.message, error.message
        assert "3" in error.message, error.message
        assert "WORLD_SIZE" in error.message or "processes" in error.message or "devices" in error.message


SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "job",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
    "SLURM_NNODES": "1",
}


def test_devices_that_do_not_match_slurm(class_path: str, plain_process: RankPool) -> None:
    (error,) = plain_process.errors(fit_on, StrategySpec(class_path), 2, env=SLURM, timeout=SECONDS)
    assert "--ntasks-per-node=1" in error.message
    assert "devices=2" in error.message


@pytest.mark.parametrize("devices", [0, -3])
def test_impossible_number_of_devices(class_path: str, plain_process: RankPool, devices: int) -> None:
    (error,) = plain_process.errors(fit_on, StrategySpec(class_path), devices, timeout=SECONDS)
    assert "devices" in error.message


def fit_on_two_nodes(strategy: StrategySpec) -> tuple[tuple[int, int, int], dict[str, Tensor]]:
    """Each rank is the only one of its node."""
    node = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=node)
    module = Mlp()
    trainer = new_trainer(strategy, devices=1, num_nodes=2)
    trainer.fit(module)
    return (trainer.global_rank, trainer.local_rank, trainer.node_rank), module.state_dict()


def test_two_nodes(class_path: str, pool2: RankPool, one_process: dict[str, Tensor]) -> None:
    ranks = pool2.run(fit_on_two_nodes, StrategySpec(class_path), timeout=SECONDS)
    assert [place for place, _ in ranks] == [(0, 0, 0), (1, 0, 1)]
    for _, weights in ranks:
        assert_same_weights(weights, one_process)
