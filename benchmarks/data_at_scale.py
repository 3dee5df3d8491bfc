"""Time and memory to plan an epoch over very many shards, from the counts alone; prints one table and writes JSON.

python benchmarks/data_at_scale.py [--shards 100000,1000000] [--samples 700] [--ranks 1000] [--batch 2048]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from lightning_llmscale.data.order import EpochOrder, auto_lanes, derive_key, permute


def plan(shards: int, samples: int, ranks: int, batch: int) -> dict[str, float]:
    """One process: seconds to the addresses of the first batch, and for a thousand more; MB of memory taken.

    Args:
        shards: Number of shards.
        samples: Mean samples of a shard.
        ranks: Number of ranks.
        batch: Global batch size.
    """
    counts = np.random.default_rng(0).integers(samples * 9 // 10, samples * 11 // 10, shards)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    order = permute(np.arange(shards), shards, derive_key(0, 0, 3))
    epoch = EpochOrder(counts[order], derive_key(0, 0), auto_lanes(batch), 4)
    mine = np.arange(batch // ranks + 1)
    epoch.locate(mine)
    first = time.perf_counter() - start
    start = time.perf_counter()
    epoch.locate((np.arange(1000)[:, None] * batch + mine).ravel())
    return {
        "first_batch_seconds": first,
        "microseconds_a_sample": (time.perf_counter() - start) * 1e6 / (1000 * len(mine)),
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="100000,1000000")
    parser.add_argument("--samples", type=int, default=700)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data_at_scale.json"))
    options = parser.parse_args()
    if options.once:
        print(json.dumps(plan(options.once, options.samples, options.ranks, options.batch)))
        return 0
    results = {}
    print("| shards | first batch, s | us a sample | MB |\n|---|---|---|---|")
    for shards in map(int, options.shards.split(",")):
        command = [sys.executable, __file__, "--once", str(shards), "--samples", str(options.samples)]
        command += ["--ranks", str(options.ranks), "--batch", str(options.batch)]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
            for _ in range(options.repeats)
        ]
        results[shards] = runs
        medians = [statistics.median(run[key] for run in runs) for key in runs[0]]
        print(f"| {shards:,} | {medians[0]:.2f} | {medians[1]:.2f} | {medians[2]:.0f} |", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": " ".join(sys.argv), "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
