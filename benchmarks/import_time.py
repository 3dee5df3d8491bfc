"""What `import lightning_llmscale` costs after `import lightning.pytorch`, in fresh processes, medians.

    python benchmarks/import_time.py [--repeats 15] [--out benchmarks/results/import_time.json]

Both imports are timed in the same process, one after the other, so the pace of the machine is the same for both. On a
machine with other work the wall time holds the waiting for a core too; the CPU time does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

GOAL_SECONDS = 0.3
FIGURES = ("lightning wall", "lightning CPU", "extra wall", "extra CPU")
_TIMED = """
import time
marks = [(time.perf_counter(), time.process_time())]
import lightning.pytorch
marks.append((time.perf_counter(), time.process_time()))
import lightning_llmscale
marks.append((time.perf_counter(), time.process_time()))
print(*(after[clock] - before[clock] for before, after in zip(marks, marks[1:]) for clock in (0, 1)))
"""


def measure(repeats: int) -> dict[str, list[float]]:
    """Times both imports in `repeats` processes, after one that warms the file cache.

    Args:
        repeats: Number of timed processes.

    Returns:
        Seconds by figure.
    """
    seconds: dict[str, list[float]] = {name: [] for name in FIGURES}
    for repeat in range(repeats + 1):
        done = subprocess.run([sys.executable, "-c", _TIMED], capture_output=True, text=True, timeout=120, check=True)
        if repeat:
            for name, value in zip(FIGURES, done.stdout.split(), strict=True):
                seconds[name].append(float(value))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/import_time.json"))
    options = parser.parse_args()
    seconds = measure(options.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| import | wall s | CPU s |\n|---|---|---|")
    print(f"| lightning.pytorch | {medians['lightning wall']:.3f} | {medians['lightning CPU']:.3f} |")
    print(f"| lightning_llmscale after it | {medians['extra wall']:.3f} | {medians['extra CPU']:.3f} |")
    print(f"goal: at most {GOAL_SECONDS} s wall after Lightning")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "lightning")},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "seconds": seconds,
        "medians": medians,
        "goal_seconds": GOAL_SECONDS,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if medians["extra wall"] <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
