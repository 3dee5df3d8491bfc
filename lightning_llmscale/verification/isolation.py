"""The user's run reduced to what decides the weights: module, batches, optimizer steps.

Callbacks, loggers, checkpoints, validation, progress bars and the profiler are switched off in both runs, dropout too
unless it is asked to stay, and the optimizers are replaced by SGD unless the user's are asked for.
"""

from __future__ import annotations

__all__ = ["Build", "NoDropout", "Runnable", "isolate", "plain_options", "replace", "strategy_options"]

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode

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


#: Argument that is the probability of dropout, and its position. Functions that call each other are all listed, because
#: inside a function that was intercepted nothing is intercepted.
_PROBABILITY: Mapping[Any, tuple[str, int]] = {
    nn.functional.dropout: ("p", 1),
    nn.functional.dropout1d: ("p", 1),
    nn.functional.dropout2d: ("p", 1),
    nn.functional.dropout3d: ("p", 1),
    nn.functional.alpha_dropout: ("p", 1),
    nn.functional.feature_alpha_dropout: ("p", 1),
    nn.functional.multi_head_attention_forward: ("dropout_p", 10),
    nn.functional.scaled_dot_product_attention: ("dropout_p", 4),
    torch.dropout: ("p", 1),
    torch.alpha_dropout: ("p", 1),
    torch.feature_dropout: ("p", 1),
    torch.feature_alpha_dropout: ("p", 1),
}
#: Take the probability at a position that depends on the form of the input; it is their only float.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class NoDropout(TorchFunctionMode):
    """While it is entered, every dropout of torch keeps all its inputs, also the functional ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PROBABILITY:
            name, position = _PROBABILITY[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        elif func in _RECURRENT:
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        return func(*args, **kwargs)
