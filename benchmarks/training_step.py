"""A training step of the demo's model on two processes: RingAllReduceStrategy against Lightning's ``ddp``, in one run.

    python benchmarks/training_step.py [--quick] [--rounds 12] [--steps 25] [--algorithm auto]

The same two processes train under either strategy in turn, the first of a round alternating, so a drift of the machine
hits both alike. A round's figure is the median step time on rank 0. The table gives the median over rounds with
quartiles; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_llmscale import RingAllReduceStrategy
from lightning_llmscale.cli.demo.model import ByteGPT

RESULTS = Path(__file__).parent / "results" / "training_step.json"
WARM_UP = 5


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Random bytes: the time of a step does not depend on their meaning."""

    def __init__(self, count: int, seq_len: int) -> None:
        self.tokens = torch.randint(0, 256, (count, seq_len + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Clock(Callback):
    """Seconds from the start of one training batch to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)][WARM_UP:]


def strategy(name: str, algorithm: Any) -> Any:
    return DDPStrategy() if name == "ddp" else RingAllReduceStrategy(algorithm=algorithm)


def step_seconds(name: str, options: argparse.Namespace) -> float:
    """Median seconds of a step in one short fit."""
    torch.manual_seed(0)
    module, clock = ByteGPT(width=options.width, depth=options.depth, seq_len=options.seq_len), Clock()
    steps = options.steps + WARM_UP + 1
    data = Bytes(2 * options.batch * steps, options.seq_len)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy(name, options.algorithm), max_steps=steps, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=options.batch))
    return statistics.median(clock.seconds())


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})
    seconds: dict[str, list[float]] = {"ddp": [], "ring_allreduce": []}
    names = list(seconds)
    for turn in range(options.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            seconds[name].append(step_seconds(name, options))
    if os.environ["RANK"] == "0":
        Path(options.worker).write_text(json.dumps(seconds))


def table(seconds: dict[str, list[float]]) -> list[str]:
    ratios = [a / b for a, b in zip(seconds["ddp"], seconds["ring_allreduce"], strict=True)]
    lines = ["strategy          median ms  (quartiles)"]
    for name, values in seconds.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(values, n=4))
        lines.append(f"{name:16} {middle:10.2f}  ({low:.2f} - {high:.2f})")
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [*lines, f"speed of ring_allreduce against ddp: {middle:.3f}x ({low:.3f} - {high:.3f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of fits")
    parser.add_argument("--steps", type=int, default=25, help="timed steps of a fit")
    parser.add_argument("--algorithm", default="auto", help="the ring strategy's algorithm")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per process and step")
    parser.add_argument("--pin", action="store_true", help="bind each process to a core")
    parser.add_argument("--quick", action="store_true", help="two short rounds, nothing written")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 8
    if options.worker:
        worker(options)
        return
    output, load = Path(f"{RESULTS}.{os.getpid()}.tmp"), os.getloadavg()[0]
    output.parent.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*launch, *sys.argv[1:], "--worker", str(output)], check=True, env=environment)
    seconds = json.loads(output.read_text())
    output.unlink()
    lines = table(seconds)
    print("\n".join(lines))
    if not options.quick:
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__, "load": load}
        shape = {key: value for key, value in vars(options).items() if key not in ("worker", "quick")}
        record = {"machine": machine, "options": shape, "table": lines, "seconds": seconds}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
