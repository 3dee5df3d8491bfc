"""Recordings written by hand: the module computes y = w x, w is tied to v, b is a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llmscale.verification import Report, Settings, compare
from lightning_llmscale.verification.recording import BatchRecord, RankInfo, RankWriter, State

W = torch.tensor([1.0, -2.0, 4.0])
GRADIENT = torch.tensor([0.5, 0.25, -1.0])
BUFFER = torch.tensor([3.0])


def write_rank(
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    *,
    start: State | None = None,
    end: State | None = None,
    gradients: list[dict[str, Tensor]] | None = None,
    losses: list[float | None] | None = None,
    weights: list[float | None] | None = None,
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write one rank; what is not given is right."""
    writer = RankWriter(folder, rank)
    writer.state("start", start or state())
    for step, values in enumerate(gradients or [{"w": GRADIENT, "v": GRADIENT}] * 2):
        writer.gradients(step, values)
    losses = [2.0, 1.0] if losses is None else losses
    for step, (loss, weight) in enumerate(zip(losses, weights or [None] * len(losses), strict=True)):
        writer.batch(torch.zeros(4))
        writer.batch_done(BatchRecord(epoch=0, step=step, loss=loss, weight=weight, samples=4))
    writer.state("end", end or state())
    facts: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "replica": rank,
        "replicas": world_size,
        "strategy": "HandWritten",
        "precision": "32-true",
        "accumulate": 1,
        "automatic_optimization": True,
        "epoch_batches": 10,
        "reduced_matmul": False,
        "batch_norms": [],
        "steps": 2,
    }
    writer.finish(RankInfo(**{**facts, **(info or {})}))


def state(w: Tensor = W, v: Tensor | None = None, b: Tensor = BUFFER) -> State:
    """Tied unless ``v`` is given."""
    return State({"w": w, "v": w if v is None else v}, {"b": b}, [["w", "v"]] if v is None else [])


def compare_two_ranks(folder: Path, settings: Settings | None = None, **second: Any) -> Report:
    """Compare ranks of which the second is as given with a right plain run."""
    write_rank(folder / "plain")
    write_rank(folder / "strategy", 0, 2)
    write_rank(folder / "strategy", 1, 2, **second)
    return compare(folder / "strategy", folder / "plain", settings or Settings())
