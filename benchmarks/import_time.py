"""What `import lightning_llmscale` costs over `import lightning.pytorch`: interleaved fresh processes, medians.

python benchmarks/import_time.py [--repeats 15] [--out benchmarks/results/import_time.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

GOAL_SECONDS = 0.3
STATEMENTS = {"lightning.pytorch": "import lightning.pytorch", "lightning_llmscale": "import lightning_llmscale"}
_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def measure(repeats: int) -> dict[str, list[float]]:
    """Times both imports `repeats` times in turn, each in a process of its own.

    Args:
        repeats: Timed processes of each kind; one more of each warms the file cache.

    Returns:
        Seconds by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for repeat in range(repeats + 1):
        for name, statement in STATEMENTS.items():
            command = [sys.executable, "-c", _TIMED.format(statement)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            if repeat:
                seconds[name].append(float(done.stdout))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/import_time.json"))
    options = parser.parse_args()
    seconds = measure(options.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    # the machine's pace drifts; two neighbours share it, so the difference is taken pair by pair
    pairs = zip(seconds["lightning_llmscale"], seconds["lightning.pytorch"], strict=True)
    extra = statistics.median(ours - peers for ours, peers in pairs)
    print("| import | median s |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} |")
    print(f"| difference (median of pairs; goal at most {GOAL_SECONDS}) | {extra:.3f} |")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "lightning")},
        "seconds": seconds,
        "extra_seconds": extra,
        "goal_seconds": GOAL_SECONDS,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if extra <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
