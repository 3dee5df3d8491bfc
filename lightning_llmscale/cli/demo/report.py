"""What the demo shows at its end: loss curves from Lightning's CSV log as numbers, a picture and a text chart."""

from __future__ import annotations

__all__ = ["Curves", "largest_difference", "plot", "read_curves", "text_chart"]

import csv
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_NATS_PER_BIT = math.log(2)
# Lightning's ThroughputMonitor logs the sum over processes only where there are several
_SPEEDS = ("train/items_per_sec", "train/device/items_per_sec")


@dataclass(frozen=True)
class Curves:
    """Losses of one run in bits per byte, by optimizer step, and its speed."""

    train: Mapping[int, float] = field(default_factory=dict)
    """Training loss of the global batch at a step."""
    val: Mapping[int, float] = field(default_factory=dict)
    """Validation loss after a step."""
    tokens_per_second: float | None = None
    """Median over the run, all processes together; ``None`` if it was too short to measure."""


def read_curves(metrics: Path) -> Curves:
    """Reads the ``metrics.csv`` that Lightning's CSVLogger wrote.

    Args:
        metrics: The file, with the columns ``step``, ``train_loss`` and ``val_loss`` (nats per token).

    Returns:
        The curves; speed from ThroughputMonitor's column if it is there.
    """
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    speeds: list[float] = []
    with metrics.open(newline="") as opened:
        for row in csv.DictReader(opened):
            step = int(row["step"])
            if row.get("train_loss"):
                train[step] = float(row["train_loss"]) / _NATS_PER_BIT
            if row.get("val_loss"):
                val[step] = float(row["val_loss"]) / _NATS_PER_BIT
            speed = next((row[name] for name in _SPEEDS if row.get(name)), None)
            if speed is not None:
                speeds.append(float(speed))
    return Curves(train, val, statistics.median(speeds) if speeds else None)


def largest_difference(left: Curves, right: Curves, first_steps: int) -> tuple[float, int]:
    """Compares the training losses of two runs.

    Args:
        left: A run; differences are relative to its losses.
        right: Another run.
        first_steps: How many of the steps that both have are compared, from the first on.

    Returns:
        The largest relative difference, and the number of steps compared (0 if they have none in common).
    """
    common = sorted(left.train.keys() & right.train.keys())[:first_steps]
    differences = [abs(left.train[step] - right.train[step]) / abs(left.train[step]) for step in common]
    return max(differences, default=0.0), len(common)


def plot(curves: Curves, entropy: float, path: Path) -> bool:
    """Draws the curves as a PNG.

    Args:
        curves: What to draw.
        entropy: Order-0 entropy of the text, bits per byte, drawn as a line.
        path: The file to write.

    Returns:
        Whether it was drawn: ``False`` without matplotlib (the extra ``plot``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_series(curves.train), color="tab:blue", alpha=0.5, linewidth=1, label="training")
    axes.plot(*_series(curves.val), color="tab:red", marker="o", markersize=4, label="validation")
    axes.axhline(entropy, color="grey", linestyle="--", label=f"order-0 entropy, {entropy:.2f}")
    axes.set(xlabel="optimizer step", ylabel="bits per byte", title="Byte-level GPT on Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def _series(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]


def text_chart(curve: Mapping[int, float], entropy: float, *, columns: int = 60, rows: int = 10) -> str:
    """Draws a loss curve with characters.

    Args:
        curve: Loss by step, bits per byte.
        entropy: Order-0 entropy, drawn as a dashed line.
        columns: Width of the plot area, in characters.
        rows: Height of the plot area, in lines.

    Returns:
        The chart, `rows` lines and an axis.
    """
    if not curve:
        return "(no losses were logged)"
    steps = sorted(curve)
    top = max(entropy, *curve.values())
    bottom = min(entropy, *curve.values())
    height = (top - bottom) or 1.0
    grid = [[" "] * columns for _ in range(rows)]

    def row_of(value: float) -> int:
        return min(rows - 1, int((top - value) / height * rows))

    grid[row_of(entropy)] = list("- " * (columns // 2))
    for column in range(columns):
        step = steps[min(len(steps) - 1, column * len(steps) // columns)]
        grid[row_of(curve[step])][column] = "*"
    lines = [f"{top - height * row / rows:6.2f} |{''.join(cells)}" for row, cells in enumerate(grid)]
    axis = f"       +{'-' * columns}\n        step {steps[0]} to {steps[-1]}; - - - order-0 entropy {entropy:.2f}"
    return "\n".join([*lines, axis])
