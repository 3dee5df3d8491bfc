"""What runs in the ranks: functions that take the strategy as their first argument and return plain values.

The same job runs in one process under plain Lightning (:data:`PLAIN`) to give the truth, and on every rank under the
strategy of the catalogue.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.conformance.models import Base

__all__ = ["PLAIN", "Fit", "StrategySpec", "fit", "new_trainer", "rank", "stored_weights", "summary"]


@dataclass(frozen=True)
class StrategySpec:
    """A strategy by class path and options; without a class path, whatever Lightning takes for one device."""

    class_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        if self.class_path is None:
            return "auto"
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)(**self.options)


PLAIN = StrategySpec()


@dataclass
class Fit:
    """Result of a training run on one rank.

    Attributes:
        losses: Loss of every training step on this rank.
        weights: The state dict in the checkpoint that the strategy writes.
        local: This rank's own state dict.
        metrics: ``trainer.callback_metrics``.
        steps: ``trainer.global_step``.
        notes: What the module noted about itself (``module.notes``).
    """

    losses: list[float]
    weights: dict[str, Tensor]
    local: dict[str, Tensor]
    metrics: dict[str, float]
    steps: int
    notes: Any = None


def rank() -> int:
    return int(os.environ["RANK"])


def new_trainer(strategy: StrategySpec, **options: Any) -> Trainer:
    """A quiet trainer of one epoch on all ranks of this world.

    A callback may be given as a function that makes it: some cannot be pickled, or look at the working folder.
    """
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    callbacks = [made if isinstance(made, Callback) else made() for made in options.pop("callbacks", [])]
    return Trainer(strategy=strategy.build(), callbacks=callbacks, **{**defaults, **options})


def stored_weights(trainer: Trainer, path: str = "weights.ckpt") -> dict[str, Tensor]:
    """Save through the strategy, and read back what is on disk."""
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return torch.load(Path(path), weights_only=False, map_location="cpu")["state_dict"]


def summary(trainer: Trainer, module: LightningModule) -> Fit:
    return Fit(
        losses=list(getattr(module, "losses", [])),
        weights=stored_weights(trainer),
        local={name: value.detach().clone() for name, value in module.state_dict().items()},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        steps=trainer.global_step,
        notes=getattr(module, "notes", None),
    )


def fit(
    strategy: StrategySpec,
    kind: type[Base],
    module_options: Mapping[str, Any] | None = None,
    trainer_options: Mapping[str, Any] | None = None,
) -> Fit:
    """Train one module."""
    module = kind(**(module_options or {}))
    trainer = new_trainer(strategy, **(trainer_options or {}))
    trainer.fit(module)
    return summary(trainer, module)
