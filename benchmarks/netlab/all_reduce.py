"""All-reduce over slow links: this package's algorithms and wires against gloo, in the network laboratory (needs root).

    python benchmarks/netlab/all_reduce.py [--quick]

Each round times every variant once, in an order that rotates from round to round; the figure of a round is the time of
the slowest host. Medians with quartiles, and the ratio of medians to gloo in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lab
import torch
import torch.distributed as dist

from lightning_llmscale.collectives.reducer import Reducer, ReducerOptions, open_reducer

RESULTS = Path(__file__).parents[1] / "results" / "network_all_reduce.json"

VARIANTS: dict[str, dict[str, tuple[str, ReducerOptions]]] = {
    "flat": {
        "ring": ("ring", ReducerOptions()),
        "direct": ("direct", ReducerOptions()),
        "direct bf16": ("direct", ReducerOptions(wire="bf16")),
        "direct int8": ("direct", ReducerOptions(wire="int8")),
    },
    "islands": {
        "ring, good order": ("ring", ReducerOptions()),
        "ring, bad order": ("ring", ReducerOptions(ring_order=[0, 2, 1, 3])),
        "ring, measured order": ("ring", ReducerOptions(ring_order="auto")),
        "two-level": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]])),
        "two-level bf16": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]], wire="bf16")),
        "two-level int8": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]], wire="int8")),
    },
}

LABS: dict[str, dict[str, Any]] = {
    "2 hosts at 100 Mbit/s": {"variants": "flat", "hosts": 2, "rate": "100mbit"},
    "4 hosts at 100 Mbit/s": {"variants": "flat", "hosts": 4, "rate": "100mbit"},
    "2 hosts at 1 Gbit/s": {"variants": "flat", "hosts": 2, "rate": "1gbit"},
    "2 islands of 2 hosts, 1 Gbit/s inside, 100 Mbit/s between": {
        "variants": "islands",
        "hosts": 4,
        "rate": "1gbit",
        "islands": 2,
    },
}


def measure(variants: str, sizes: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """One host's part: the seconds of every round by size and variant."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world_size)
    hosts = [f"h{host}" for host in range(world_size)]
    reducers: dict[str, Reducer | None] = {"gloo": None}
    for name, (algorithm, options) in VARIANTS[variants].items():
        reducers[name] = open_reducer(
            algorithm, rank=rank, world_size=world_size, store=store, hosts=hosts, options=options
        )
    seconds: dict[str, dict[str, list[float]]] = {}
    for megabytes in sizes:
        flat = torch.ones(megabytes << 18)
        times = seconds[str(megabytes)] = {name: [] for name in reducers}
        names = list(reducers)
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                elapsed = slowest(flat, reducers[name], world_size)
                if turn:  # the first round only warms up
                    times[name].append(elapsed)
    for reducer in reducers.values():
        if reducer is not None:
            reducer.close()
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def slowest(flat: torch.Tensor, reducer: Reducer | None, world_size: int) -> float:
    """Seconds of one all-reduce on the slowest host."""
    dist.barrier()
    started = time.perf_counter()
    if reducer is None:
        dist.all_reduce(flat)
        flat.mul_(1 / world_size)
    else:
        reducer.all_reduce(flat, 1 / world_size, "gradient")
    elapsed = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def table(results: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    lines = [f"{'MB':>4}  {'variant':22} {'median ms':>10}  {'(quartiles)':20} against gloo"]
    for name, sizes in results.items():
        lines.append(name)
        for megabytes, seconds in sizes.items():
            gloo = statistics.median(seconds["gloo"])
            for variant, times in seconds.items():
                low, middle, high = (1e3 * value for value in statistics.quantiles(times, n=4))
                spread = f"({low:.1f} - {high:.1f})"
                lines.append(f"{megabytes:>4}  {variant:22} {middle:10.1f}  {spread:20} {1e3 * gloo / middle:9.2f}x")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--quick", action="store_true", help="few rounds of one size, nothing written")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # set on the hosts: which variants
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes, rounds = ([2], 4) if options.quick else (options.megabytes, options.rounds)
    if options.here:
        seconds = measure(options.here, sizes, rounds)
        if os.environ["RANK"] == "0":
            Path(options.output).write_text(json.dumps(seconds))
        return
    reason = lab.refusal()
    if reason is not None:
        sys.exit(reason)
    results = {}
    for name, place in LABS.items():
        output = Path(f"{RESULTS}.{os.getpid()}.tmp")
        output.parent.mkdir(exist_ok=True)
        command = [sys.executable, *sys.argv, "--here", place.pop("variants"), "--output", str(output)]
        subprocess.run(lab.start(command, **place), check=True)
        results[name] = json.loads(output.read_text())
        output.unlink()
    lines = table(results)
    print("\n".join(lines))
    if not options.quick:
        machine = {"cpus": os.cpu_count(), "torch": torch.__version__, "load at the end": os.getloadavg()[0]}
        RESULTS.write_text(json.dumps({"machine": machine, "table": lines, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
