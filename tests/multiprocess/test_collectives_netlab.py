"""Two hosts of the network laboratory, started by torchrun: sums over a limited link, then the cable is pulled.

This file is also the script that runs on the hosts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from lightning_llmscale import _compat
from lightning_llmscale.collectives.reducer import ReducerOptions, open_reducer
from lightning_llmscale.errors import PeerFailureError

ROOT = Path(__file__).resolve().parents[2]
PEER_TIMEOUT = 2.0


def laboratory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lab", ROOT / "benchmarks" / "netlab" / "lab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_a_host(folder: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, os.uname().nodename)
    store = dist.PrefixStore("test", _compat.default_store())
    found: dict[str, object] = {"hosts": names}
    for wire in ("fp32", "int8"):
        reducer = open_reducer(
            "auto",
            rank=rank,
            world_size=world_size,
            store=store,
            hosts=names,
            peer_timeout=PEER_TIMEOUT,
            options=ReducerOptions(wire=wire),
        )
        flat = torch.full((500_000,), float(rank + 1))
        started = time.perf_counter()
        reducer.all_reduce(flat, 0.5, "gradient")
        found[wire] = [flat.min().item(), flat.max().item(), time.perf_counter() - started]
        if wire == "fp32":
            reducer.close()
    dist.barrier()
    if rank == 1:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    pulled = time.monotonic()
    try:
        while True:
            reducer.all_reduce(flat, 0.5, "gradient")
    except PeerFailureError as error:
        found["error"], found["seconds"] = str(error), time.monotonic() - pulled
    reducer.close()
    if rank == 1:  # torchrun's agents want to part in order
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def test_two_hosts_sum_over_a_slow_link_and_notice_its_loss(tmp_path: Path) -> None:
    lab = laboratory()
    if (reason := lab.refusal()) is not None:
        pytest.skip(reason)
    launch = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK "
        f"--master-addr $MASTER_ADDR --master-port $MASTER_PORT {__file__} {tmp_path}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = lab.start(["sh", "-c", launch], hosts=2, rate="100mbit")
    subprocess.run(command, env=environment, capture_output=True, timeout=100)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["hosts"] == ["h0", "h1"]
        assert found["fp32"][:2] == [1.5, 1.5]
        assert found["int8"][:2] == pytest.approx([1.5, 1.5], rel=0.01)
        assert found["fp32"][2] > 0.1  # 2 MB at 100 Mbit/s take 160 ms: the link is slow indeed
        assert f"rank {1 - rank}" in found["error"]
        assert "heard nothing" in found["error"]
        assert PEER_TIMEOUT <= found["seconds"] < PEER_TIMEOUT + 10


if __name__ == "__main__":
    on_a_host(sys.argv[1])
