"""`llmscale demo` as a user types it: it ends, shows what it promises, and one process gives the same losses as two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_llmscale.cli.demo.report import largest_difference, read_curves

PROMISED = [
    "order-0 entropy",
    "training loss",
    "validation loss",
    "tokens per second",
    "checkpoint",
    "A sample of what it writes",
    "trainer.strategy",
]


def demo(folder: Path, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lightning_llmscale", "demo", *args]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_one_process_and_two_give_the_same_loss_curve(tmp_path: Path) -> None:
    two = demo(tmp_path, "--devices=2", "--steps=24", "--out=out")
    one = demo(tmp_path, "--devices=1", "--steps=24", "--out=out")
    for words in PROMISED:
        assert words in two
        assert words in one
    assert "largest relative difference" in one

    curves = [read_curves(tmp_path / f"out/ring_allreduce-{n}/logs/metrics.csv") for n in (1, 2)]
    assert len(curves[0].train) == len(curves[1].train) == 24
    difference, steps = largest_difference(*curves, first_steps=24)
    assert steps == 24
    assert difference < 1e-4
    assert curves[0].val == pytest.approx(curves[1].val, rel=1e-4)

    for run in ("ring_allreduce-1", "ring_allreduce-2"):
        assert list((tmp_path / "out" / run / "checkpoints").glob("*.ckpt"))
        config = yaml.safe_load((tmp_path / "out" / run / "run.yaml").read_text())
        assert config["trainer"]["strategy"] == {"class_path": "lightning_llmscale.RingAllReduceStrategy"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_demo_learns_text_in_four_minutes(tmp_path: Path) -> None:
    shown = demo(tmp_path)
    entropy, first, trained, validated, seconds = (
        float(re.search(pattern, shown)[1])  # type: ignore[index]
        for pattern in (
            r"order-0 entropy +([\d.]+)",
            r"training loss +([\d.]+)",
            r"training loss +[\d.]+ -> ([\d.]+)",
            r"validation loss +([\d.]+)",
            r"The demo took (\d+) s",
        )
    )
    assert first == pytest.approx(8.0, abs=0.2)  # a uniform guess over 257 tokens
    assert trained < entropy - 1.0
    assert validated < entropy - 1.0
    assert seconds < 240


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--devices=0"], "--devices 0"),
        (["--strategy=ring_allredcue"], "did you mean 'ring_allreduce'"),
        (["--out=/proc/x"], "cannot be written"),
    ],
)
def test_bad_options_end_before_anything_is_packed(args: list[str], words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_llmscale", "demo", *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
