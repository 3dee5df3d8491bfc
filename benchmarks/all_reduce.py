"""All-reduce of fp32 on one host: shared memory and the ring of sockets against gloo, in one run.

    python benchmarks/all_reduce.py [--quick] [--worlds 2 4] [--megabytes 1 16 128]

Each round times every reducer once, in an order that rotates from round to round, so a drift of the machine hits all
alike; the figure of a round is the time of the slowest rank. The table gives medians with quartiles, the ratio of
medians to gloo in the same run, and the distance to the floor: three times a plain copy of the buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_llmscale.collectives.reducer import Reducer, open_reducer

RESULTS = Path(__file__).parent / "results" / "all_reduce.json"
NAMES = ("gloo", "shared_memory", "ring")
COPIES_AT_LEAST = 3


def measure(rank: int, world_size: int, port: int, sizes: list[int], rounds: int, output: str) -> None:
    """One rank of one world; rank 0 writes the seconds of every round to ``output``."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world_size)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "store": store, "hosts": ["here"] * world_size}
    reducers: dict[str, Reducer] = {
        "shared_memory": open_reducer("shared_memory", **place),
        "ring": open_reducer("ring", **place),
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    for megabytes in sizes:
        flat = torch.ones(megabytes << 18)
        seconds[str(megabytes)] = {name: [] for name in (*NAMES, "copy")}
        for turn in range(rounds + 1):
            shift = turn % len(NAMES)
            for name in NAMES[shift:] + NAMES[:shift]:
                elapsed = slowest(flat, reducers.get(name), world_size)
                if turn:  # the first round only warms up
                    seconds[str(megabytes)][name].append(elapsed)
            seconds[str(megabytes)]["copy"].append(copy_seconds(flat))
        assert torch.equal(flat, torch.ones_like(flat)), "the mean of ones is one"
    for reducer in reducers.values():
        reducer.close()
    if rank == 0:
        Path(output).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def slowest(flat: torch.Tensor, reducer: Reducer | None, world_size: int) -> float:
    """Seconds of one all-reduce on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    if reducer is None:
        dist.all_reduce(flat)
        flat.mul_(1 / world_size)
    else:
        reducer.all_reduce(flat, 1 / world_size)
    elapsed = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def copy_seconds(flat: torch.Tensor) -> float:
    target = torch.empty_like(flat)
    target.copy_(flat)
    started = time.perf_counter()
    target.copy_(flat)
    return time.perf_counter() - started


def table(results: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    lines = ["ranks     MB  reducer          median ms  (quartiles)          against gloo  floors of 3 copies"]
    for world_size, sizes in results.items():
        for megabytes, seconds in sizes.items():
            gloo = statistics.median(seconds["gloo"])
            floor = COPIES_AT_LEAST * statistics.median(seconds["copy"])
            for name in NAMES:
                low, middle, high = (1e3 * value for value in statistics.quantiles(seconds[name], n=4))
                ratios = f"{1e3 * gloo / middle:10.2f}x {middle / 1e3 / floor:15.1f}"
                spread = f"({low:.2f} - {high:.2f})"
                lines.append(f"{world_size:>5} {megabytes:>6}  {name:14} {middle:11.2f}  {spread:20} {ratios}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 128], help="sizes of the tensor")
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds per size")
    parser.add_argument("--quick", action="store_true", help="few rounds of small sizes, nothing written")
    options = parser.parse_args()
    sizes, rounds = ([1, 16], 5) if options.quick else (options.megabytes, options.rounds)
    load = os.getloadavg()[0]
    results = {}
    for world_size in options.worlds:
        output = Path(f"{RESULTS}.{os.getpid()}.tmp")
        output.parent.mkdir(exist_ok=True)
        port = 20000 + os.getpid() % 10000 + world_size
        mp.spawn(measure, (world_size, port, sizes, rounds, str(output)), nprocs=world_size)
        results[str(world_size)] = json.loads(output.read_text())
        output.unlink()
    lines = table(results)
    print("\n".join(lines))
    if not options.quick:
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__, "load": load}
        RESULTS.write_text(json.dumps({"machine": machine, "table": lines, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
