"""Each private name of Lightning, torchmetrics and torch that the package uses still exists."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import SumMetric

from lightning_llmscale._compat import PRIVATE_NAMES


@pytest.fixture(scope="module")
def roots() -> dict[str, Any]:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
    trainer.strategy.connect(LightningModule())
    trainer.state.fn = TrainerFn.VALIDATING
    trainer.validating = True
    return {"trainer": trainer, "strategy": DDPStrategy(), "metric": SumMetric()}


@pytest.mark.parametrize("name", sorted(PRIVATE_NAMES))
def test_private_name_exists(name: str, roots: dict[str, Any]) -> None:
    root, _, path = name.partition(":")
    start = roots[root] if root in roots else import_module(root)
    reduce(getattr, path.split("."), start)
