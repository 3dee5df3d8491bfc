"""Modules that the tests of the command line train; each process imports them by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from typing_extensions import override

from lightning_llmscale.errors import DataError
from tests.unit.cli.runs import Regression


class Reporting(Regression):
    """Leaves a file for each rank that trained to the end."""

    @override
    def on_train_end(self) -> None:
        Path(f"rank{self.trainer.global_rank}-of-{self.trainer.world_size}").touch()


class Refusing(Regression):
    """Meets a mistake of the user on every rank."""

    @override
    def setup(self, stage: str) -> None:
        raise DataError("the sample weighs -1; weigh it with 0 or more.")


class RefusingOnRankOne(Regression):
    """Meets a mistake of the user in the second step of one rank."""

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise DataError("the sample weighs -1; weigh it with 0 or more.")
        return super().training_step(batch, batch_idx)


class Buggy(Regression):
    """Has a bug."""

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 // batch_idx if batch_idx == 0 else 1)
