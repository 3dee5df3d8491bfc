"""Break one rank on purpose, at a chosen step and phase, to see what the others do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_llmscale.errors import ConfigurationError

__all__ = ["Chaos"]

Action = Literal["kill", "stop", "slow", "corrupt"]
Phase = Literal["batch_start", "backward", "gradients", "optimizer_step", "batch_end", "validation", "checkpoint"]


class Chaos(Callback):
    """Injects one fault, by the clock of the training loop and never by that of the wall.

    Args:
        action: ``"kill"``: SIGKILL to the own process, as by an out-of-memory killer. ``"stop"``: SIGSTOP, as on a
            frozen machine. ``"slow"``: sleep `seconds` in this and every later step, a straggler. ``"corrupt"``: write
            NaN into one weight, a defect that no process notices by itself.
        rank: Global rank that breaks.
        step: ``trainer.global_step`` at which it breaks, 0 for the first.
        phase: Where within the step: as the batch starts, before backward, when gradients are there, before the
            optimizer steps, as the batch ends, as the next validation starts, or while a checkpoint is put together.
        seconds: For ``"slow"``: how long each step is held up.

    Raises:
        ConfigurationError: For an unknown action or phase, a negative step or rank, or no time to sleep.

    Example:
        >>> Trainer(callbacks=[Chaos("kill", rank=1, step=20, phase="gradients")])  # doctest: +SKIP
    """

    def __init__(
        self, action: Action, *, rank: int, step: int, phase: Phase = "batch_start", seconds: float = 1.0
    ) -> None:
        super().__init__()
        for option, value, valid in (("action", action, get_args(Action)), ("phase", phase, get_args(Phase))):
            if value not in valid:
                raise ConfigurationError(f"{option}={value!r} is unknown; use one of {', '.join(map(repr, valid))}")
        if rank < 0 or step < 0 or seconds <= 0:
            raise ConfigurationError(f"rank={rank}, step={step}, seconds={seconds}: need rank, step >= 0, seconds > 0")
        self.action, self.rank, self.step, self.phase, self.seconds = action, rank, step, phase, seconds
        self._done = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.rank >= trainer.world_size:
            raise ConfigurationError(
                f"Chaos(rank={self.rank}) can never strike: this run has ranks 0 to {trainer.world_size - 1}"
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._reach("batch_start", trainer, pl_module)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._reach("backward", trainer, pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("gradients", trainer, pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._reach("optimizer_step", trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # the step that has just been made was the one before
        self._reach("batch_end", trainer, pl_module, step=trainer.global_step - 1)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step > self.step:
            self._reach("validation", trainer, pl_module, step=self.step)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step > self.step:
            self._reach("checkpoint", trainer, pl_module, step=self.step)

    def _reach(self, phase: Phase, trainer: Trainer, module: LightningModule, step: int | None = None) -> None:
        now = trainer.global_step if step is None else step
        if phase != self.phase or trainer.global_rank != self.rank or now < self.step:
            return
        if self.action == "slow":
            time.sleep(self.seconds)
        elif now == self.step and not self._done:
            self._done = True
            self._strike(module)

    def _strike(self, module: LightningModule) -> None:
        if self.action == "corrupt":
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] = float("nan")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
