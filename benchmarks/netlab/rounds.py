"""What the benchmarks of the network laboratory share: interleaved rounds on all hosts, one table, one JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lab
import torch
import torch.distributed as dist

from lightning_llmscale.collectives.reducer import Algorithm, Reducer, ReducerOptions, open_reducer

__all__ = ["connect", "interleave", "main"]

Seconds = dict[str, dict[str, list[float]]]
"""Of each round, by case and variant; the first variant is what the others are compared with."""


def connect() -> Callable[[Algorithm, ReducerOptions], Reducer]:
    """Join this host to the others; the result opens reducers among them."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world_size)
    hosts = [f"h{host}" for host in range(world_size)]

    def open_here(algorithm: Algorithm, options: ReducerOptions) -> Reducer:
        return open_reducer(algorithm, rank=rank, world_size=world_size, store=store, hosts=hosts, options=options)

    return open_here


def interleave(variants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time every variant once a round, in an order that rotates; each figure is that of the slowest host."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            started = time.perf_counter()
            variants[name]()
            elapsed = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if turn >= 2:  # two rounds of warming up: DDP fills its buckets anew after its first step
                seconds[name].append(float(elapsed))
    return seconds


def table(results: Mapping[str, Seconds]) -> list[str]:
    lines = [f"{'case':>6}  {'variant':22} {'median ms':>10}  {'(quartiles)':20} {'speed':>6}"]
    for place, cases in results.items():
        lines.append(place)
        for case, seconds in cases.items():
            base = statistics.median(next(iter(seconds.values())))
            for variant, times in seconds.items():
                low, middle, high = (1e3 * value for value in statistics.quantiles(times, n=4))
                spread = f"({low:.1f} - {high:.1f})"
                lines.append(f"{case:>6}  {variant:22} {middle:10.1f}  {spread:20} {1e3 * base / middle:5.2f}x")
    return lines


def main(
    description: str | None,
    result: str,
    labs: Mapping[str, dict[str, Any]],
    measure: Callable[[str, bool, int], Seconds],
) -> None:
    """Run a benchmark in each laboratory, print the table and keep the figures.

    Args:
        description: For ``--help``.
        result: Name of the file in ``benchmarks/results``.
        labs: Arguments of :func:`lab.start` by name of the place.
        measure: ``measure(place, quick, rounds)``: one host's part.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few rounds of the smallest case, nothing written")
    parser.add_argument("--place", default="", help="only laboratories whose name contains this; nothing written")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # set on the hosts: the place
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        seconds = measure(options.here, options.quick, 4 if options.quick else options.rounds)
        if os.environ["RANK"] == "0":
            Path(options.output).write_text(json.dumps(seconds))
        dist.barrier()
        dist.destroy_process_group()
        return
    reason = lab.refusal()
    if reason is not None:
        sys.exit(reason)
    path = Path(__file__).parents[1] / "results" / result
    path.parent.mkdir(exist_ok=True)
    results: dict[str, Seconds] = {}
    for place, network in labs.items():
        if options.place not in place:
            continue
        output = Path(f"{path}.{os.getpid()}.tmp")
        command = [sys.executable, *sys.argv, "--here", place, "--output", str(output)]
        subprocess.run(lab.start(command, **network), check=True)
        results[place] = json.loads(output.read_text())
        output.unlink()
    lines = table(results)
    print("\n".join(lines))
    if not options.quick and not options.place:
        machine = {"cpus": os.cpu_count(), "torch": torch.__version__, "load at the end": os.getloadavg()[0]}
        path.write_text(json.dumps({"machine": machine, "table": lines, "seconds": results}, indent=1) + "\n")
