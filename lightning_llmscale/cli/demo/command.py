"""`llmscale demo`: pack real text, write a YAML file, train through `llmscale fit`, and show what came out."""

from __future__ import annotations

__all__ = ["run"]

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from lightning_llmscale.cli.checks import check_writable
from lightning_llmscale.cli.demo.corpus import Corpus, pack_standard_library
from lightning_llmscale.cli.demo.model import ByteGPT
from lightning_llmscale.cli.demo.report import Curves, largest_difference, plot, read_curves, text_chart
from lightning_llmscale.cli.strategy_names import strategy_config
from lightning_llmscale.errors import ConfigurationError

_GLOBAL_BATCH = 16
_SEQ_LEN = 64
_VALIDATIONS = 6
_SHORTEST_INTERVAL = 24  # a validation costs as much as so many steps
_COMPARED_STEPS = 100  # runs of other world sizes round differently; over more steps training amplifies the last bits
_PROMPT = "def "
_SECONDS_TO_LEAVE = 10.0


def run(args: list[str]) -> int:
    """Runs the demo.

    Args:
        args: The options after ``demo``; see ``--help``.

    Returns:
        0, or the exit code of the training run if it failed.
    """
    options = _parser().parse_args(args)
    started = time.monotonic()
    out = Path(options.out)
    _check(options, out)
    corpus = pack_standard_library(out / "shards")
    print(
        f"Text: {corpus.files} files of Python's standard library, {corpus.train_bytes / 1e6:.1f} MB to train on, "
        f"{corpus.val_bytes / 1e6:.2f} MB held out, in {corpus.folder}"
    )
    folder = out / f"{_short_name(options.strategy)}-{options.devices}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [folder / "loss.png", *folder.glob("logs/metrics.csv"), *folder.glob("checkpoints/*.ckpt")]:
        stale.unlink(missing_ok=True)  # of an earlier demo: what is shown below belongs to this one
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(run_config(options, corpus, folder), sort_keys=False))
    print(f"Training: llmscale fit --config {config}\n", flush=True)
    code = _fit(config)
    if code:
        return code
    _report(options, corpus, folder)
    print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmscale demo",
        description="Trains a small byte-level GPT on the sources of Python's standard library, as any run does: packs "
        "WebDataset shards, writes a run.yaml, starts `llmscale fit --config run.yaml`, and shows the result.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine's CPU (default: 2)")
    parser.add_argument(
        "--strategy", default="ring_allreduce", help="short name, class name or class path (default: ring_allreduce)"
    )
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: 1200)")
    parser.add_argument("--minutes", type=float, default=2.5, help="stop training after so long (default: 2.5)")
    parser.add_argument("--out", default="llmscale_demo", help="folder for shards, logs and results")
    return parser


def _check(options: argparse.Namespace, out: Path) -> None:
    for name in ("devices", "steps", "minutes"):
        if getattr(options, name) <= 0:
            raise ConfigurationError(f"--{name} {getattr(options, name)} is too small; give a number above 0.")
    if options.devices > _GLOBAL_BATCH:
        raise ConfigurationError(
            f"--devices {options.devices} is more than the {_GLOBAL_BATCH} sequences of a batch; give at most so many."
        )
    strategy_config(options.strategy)
    check_writable("--out", out)


def _short_name(strategy: str) -> str:
    return strategy.rsplit(".", 1)[-1]


def run_config(options: argparse.Namespace, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Returns what ``run.yaml`` holds: an ordinary LightningCLI configuration.

    Args:
        options: The demo's command line.
        corpus: The packed text.
        folder: Where logs and checkpoints go.
    """
    model = f"{ByteGPT.__module__}.{ByteGPT.__qualname__}"
    return {
        "seed_everything": 1,
        "trainer": {
            "strategy": strategy_config(options.strategy),
            "accelerator": "cpu",
            "devices": options.devices,
            "gradient_clip_val": 1.0,
            "max_steps": options.steps,
            "max_time": {"seconds": max(1, round(options.minutes * 60))},
            "val_check_interval": max(options.steps // _VALIDATIONS, min(options.steps, _SHORTEST_INTERVAL)),
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "", "version": "logs"},
            },
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(folder / "checkpoints"),
                        "filename": "gpt-{step}",
                        "save_on_train_epoch_end": True,
                        "enable_version_counter": False,
                    },
                },
                {
                    "class_path": "lightning.pytorch.callbacks.ThroughputMonitor",
                    "init_args": {
                        "batch_size_fn": "lightning_llmscale.cli.demo.model.sequences",
                        "length_fn": "lightning_llmscale.cli.demo.model.tokens",
                        "window_size": 20,
                    },
                },
            ],
        },
        "model": {"class_path": model, "init_args": {"seq_len": _SEQ_LEN}},
        "data": {
            "class_path": "lightning_llmscale.WebDatasetDataModule",
            "init_args": {
                "train": f"{corpus.folder}/train-*.tar",
                "val": f"{corpus.folder}/val-*.tar",
                "global_batch_size": _GLOBAL_BATCH,
                "seq_len": _SEQ_LEN,
            },
        },
    }


def _fit(config: Path) -> int:
    """Starts ``llmscale fit`` as a user would; Lightning then starts the other ranks with the same command line."""
    # Lightning's and torch's advice on loggers, workers and speed is not the topic here
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "lightning_llmscale", "fit", "--config", str(config)]
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                return process.wait()
            finally:
                _end_group(process)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the run and the ranks it has started, which must not go on without the demo."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # all of them have left
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_SECONDS_TO_LEAVE)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _report(options: argparse.Namespace, corpus: Corpus, folder: Path) -> None:
    curves = read_curves(folder / "logs" / "metrics.csv")
    checkpoint = max((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    picture = folder / "loss.png"
    drawn = plot(curves, corpus.entropy, picture)
    if len(curves.train) < options.steps:
        print(f"\nStopped after --minutes {options.minutes:g}, before the {options.steps} steps were done.")
    print("\n" + text_chart(curves.train, corpus.entropy) + "\n")
    print(_losses(curves, corpus.entropy))
    if curves.tokens_per_second is not None:
        print(f"speed            {curves.tokens_per_second:,.0f} tokens per second on {options.devices} process(es)")
    for other in sorted(folder.parent.glob("*/logs/metrics.csv")):
        if other.parent.parent != folder:
            _compare(curves, other)
    print(f"checkpoint       {checkpoint}")
    print(f"loss curve       {picture if drawn else 'no loss.png without matplotlib: pip install matplotlib'}")
    model = ByteGPT.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    print(f"\nA sample of what it writes after {_PROMPT!r}:\n")
    print("\n".join("    " + line for line in model.generate(_PROMPT, 300).splitlines()))
    print(_next_steps(folder))


def _losses(curves: Curves, entropy: float) -> str:
    first, last = min(curves.train), max(curves.train)
    tail = [curves.train[step] for step in sorted(curves.train)[-20:]]
    lines = [
        f"order-0 entropy  {entropy:.3f} bits per byte: what guessing by byte frequency alone needs",
        f"training loss    {curves.train[first]:.3f} -> {statistics.mean(tail):.3f} bits per byte in {last + 1} steps",
    ]
    if curves.val:
        lines.append(f"validation loss  {curves.val[max(curves.val)]:.3f} bits per byte on held-out files")
    return "\n".join(lines)


def _compare(curves: Curves, other: Path) -> None:
    difference, steps = largest_difference(curves, read_curves(other), _COMPARED_STEPS)
    if steps:
        print(
            f"same result?     largest relative difference of the training loss from {other.parent.parent.name}: "
            f"{difference:.1e} over the first {steps} steps"
        )


def _next_steps(folder: Path) -> str:
    return f"""
Next, change one line of {folder / "run.yaml"} and run it with `llmscale fit --config`:
    trainer.strategy     another strategy (`llmscale strategies` lists them), or ddp
    trainer.devices      the number of processes; the loss curve stays the same
    model.class_path     your own LightningModule"""
