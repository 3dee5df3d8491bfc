"""Modules that the tests of the command line train, and a way to run a command in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_llmscale.cli import main

MODULE = f"{__name__}.Regression"


class Regression(LightningModule):
    """The smallest module that trains."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.width = width

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.ones(16, self.width)), batch_size=2)


class Done(NamedTuple):
    """What a command returned and printed."""

    code: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *args: str) -> Done:
    """Runs ``llmscale ARGS`` in this process, for commands that end before training."""
    try:
        code = main(args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capsys.readouterr()
    return Done(code, captured.out, captured.err)
