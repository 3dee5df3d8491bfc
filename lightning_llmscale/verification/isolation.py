"""The user's run reduced to what decides the weights: module, batches, optimizer steps.

Callbacks, loggers, checkpoints, validation, progress bars and the profiler are switched off in both runs, dropout too
unless it is asked to stay, and the optimizers are replaced by SGD unless the user's are asked for.
"""

from __future__ import annotations

__all__ = ["Build", "Runnable", "isolate", "plain_options", "replace", "strategy_options"]

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import SGD, Optimizer

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification.settings import Settings


class Runnable(Protocol):
    """What a build function returns; a ``LightningCLI(run=False)`` is one."""

    @property
    def trainer(self) -> Trainer:
        """Trainer whose ``fit`` has not been called."""

    @property
    def model(self) -> LightningModule:
        """The user's module."""

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The user's data; None if the module has its own loaders."""


#: Builds a run from command line arguments and from Trainer arguments that replace the configured ones. It must be a
#: function of an importable module, because each process of a run imports and calls it.
Build = Callable[[Sequence[str], Mapping[str, Any]], Runnable]


def strategy_options(folder: Path) -> dict[str, Any]:
    """Trainer arguments of both runs: everything off that does not decide the weights."""
    return {
        "barebones": False,
        "callbacks": [],
        "default_root_dir": str(folder),
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "logger": DummyLogger(),  # a module may call self.logger, so it is not None
        "min_epochs": None,
        "min_steps": None,
        "num_sanity_val_steps": 0,
        "profiler": None,
    }


def plain_options(folder: Path) -> dict[str, Any]:
    """Trainer arguments of the reference: one process, Lightning's own single-device strategy, recorded batches."""
    return {
        **strategy_options(folder),
        "devices": 1,
        "limit_train_batches": 1.0,  # the recorded epochs were cut already
        "num_nodes": 1,
        "overfit_batches": 0.0,
        "strategy": "auto",
        "sync_batchnorm": False,
    }


def isolate(run: Runnable, settings: Settings, callbacks: Sequence[Callback]) -> None:
    """Replaces the callbacks of a run and, for SGD, the optimizers of its module.

    The replacements are attributes of the instance made of importable functions, so that strategies which pickle the
    module to their processes keep them.
    """
    replace(run.trainer, "callbacks", list(callbacks))
    replace(run.model, "configure_callbacks", _no_callbacks)
    if settings.optimizer == "sgd":
        original = run.model.configure_optimizers
        replace(run.model, "configure_optimizers", partial(_sgd_like, run.model, original, settings.sgd_lr))


def replace(owner: object, name: str, value: Any) -> None:
    """Overrides a method of one object only (setattr, because a type checker refuses to assign to a method)."""
    setattr(owner, name, value)


def _no_callbacks() -> list[Callback]:
    return []


def _sgd_like(
    model: LightningModule, configure_optimizers: Callable[[], Any], lr: float
) -> Optimizer | list[Optimizer] | None:
    """One SGD for each of the module's optimizers, over the same parameters and groups; schedules are left out."""
    optimizers, schedules = _optimizers_and_schedules(configure_optimizers())
    if schedules and not model.automatic_optimization:
        raise ConfigurationError(
            f"{type(model).__name__} optimises by hand and steps its own learning rate schedule, which SGD cannot "
            "follow: verify with --optimizer user."
        )
    plain = [SGD([{"params": group["params"]} for group in one.param_groups], lr=lr) for one in optimizers]
    if not plain:
        return None
    return plain[0] if len(plain) == 1 else list(plain)


def _optimizers_and_schedules(configured: Any) -> tuple[list[Any], bool]:
    """Takes apart every form that ``configure_optimizers`` may return."""
    if configured is None:
        return [], False
    if isinstance(configured, Mapping):
        return [configured["optimizer"]], configured.get("lr_scheduler") is not None
    if isinstance(configured, (list, tuple)):
        if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
            return list(configured[0]), bool(configured[1])
        pairs = [_optimizers_and_schedules(one) for one in configured]
        return [one for some, _ in pairs for one in some], any(scheduled for _, scheduled in pairs)
    return [configured], False
