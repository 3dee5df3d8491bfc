"""A deadline for every training step, for hangs that no collective sees: a data loader, a lock, an endless loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_llmscale.errors import ConfigurationError

__all__ = ["HangWatchdog"]

log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds from the alarm until a process whose main thread took no notice is ended


class HangWatchdog(Callback):
    """Ends the run on all ranks, in words, when a training step takes too long.

    Waits between ranks have deadlines of their own (see the strategies); this callback is for a main thread that is
    stuck by itself. It prints the stack of every thread, lets all ranks know what each of them was doing, and ends the
    process if its main thread does not come back.

    Args:
        step_timeout: Seconds that a training step may take, from the start of one batch to the start of the next;
            validation and checkpoints between them have the same time each.
        first_step_timeout: The same for the first step, which may compile; ten times `step_timeout` by default.

    Raises:
        ConfigurationError: If a timeout is not positive.

    Example:
        >>> Trainer(callbacks=[HangWatchdog(step_timeout=120)])  # doctest: +SKIP
    """

    def __init__(self, step_timeout: float = 300.0, first_step_timeout: float | None = None) -> None:
        super().__init__()
        first = 10 * step_timeout if first_step_timeout is None else first_step_timeout
        if step_timeout <= 0 or first <= 0:
            raise ConfigurationError(f"step_timeout={step_timeout}, first_step_timeout={first}: give seconds > 0")
        self.step_timeout, self.first_step_timeout = step_timeout, first
        self._fed, self._limit, self._place = 0.0, first, "the first step"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._feed("the first step", self.first_step_timeout)
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, args=(trainer,), name="llmscale-watchdog", daemon=True)
        self._thread.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._feed(f"the step after batch {batch_idx}", self.step_timeout)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._feed("validation", self.step_timeout)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._feed("the step after validation", self.step_timeout)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._feed("saving a checkpoint", self.step_timeout)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _feed(self, place: str, limit: float) -> None:
        self._place, self._limit, self._fed = place, limit, time.monotonic()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def _watch(self, trainer: Trainer) -> None:
        while not self._stop.wait(min(0.5, self._limit / 4)):
            if time.monotonic() - self._fed > self._limit:
                self._alarm(trainer)
                return

    def _alarm(self, trainer: Trainer) -> None:
        sentence = f"rank {trainer.global_rank} has spent more than {self._limit:g} s in {self._place}"
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        control = getattr(trainer.strategy, "control", None)
        if control is None:
            log.error("%s", sentence)
        else:
            control.alarm(sentence)
            sentence = control.wait_for_failure(_GRACE) or sentence
        if not self._stop.wait(_GRACE):
            print(f"rank {trainer.global_rank} ends: {sentence}", file=sys.stderr, flush=True)
            os._exit(1)
