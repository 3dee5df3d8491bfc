"""When the injector strikes, in one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_llmscale.callbacks import Chaos
from lightning_llmscale.errors import ConfigurationError


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class FirstNan(Callback):
    """After how many optimizer steps a weight was first seen not to be a number."""

    seen: int | None = None

    def look(self, trainer: Trainer, module: LightningModule) -> None:
        if self.seen is None and not all(torch.isfinite(p).all() for p in module.parameters()):
            self.seen = trainer.global_step

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.look(trainer, module)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.look(trainer, module)


def run(*callbacks: Callback) -> Trainer:
    data = DataLoader(torch.randn(6, 1), batch_size=1)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(), data, data)
    return trainer


@pytest.mark.parametrize("phase", ["batch_start", "backward", "gradients", "optimizer_step"])
def test_corruption_strikes_in_its_step(phase: Any) -> None:
    watch = FirstNan()
    run(Chaos("corrupt", rank=0, step=3, phase=phase), watch)
    assert watch.seen is not None
    assert 3 <= watch.seen <= 4


def test_nothing_strikes_another_rank() -> None:
    with pytest.raises(ConfigurationError, match="can never strike: this run has ranks 0 to 0"):
        run(Chaos("corrupt", rank=1, step=0))


def test_a_straggler_is_held_up_in_every_later_step() -> None:
    started = time.monotonic()
    run(Chaos("slow", rank=0, step=2, seconds=0.2))
    assert time.monotonic() - started >= 4 * 0.2


@pytest.mark.parametrize("options", [{"action": "explode"}, {"phase": "dawn"}, {"step": -1}, {"seconds": 0.0}])
def test_a_wrong_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Chaos(**{"action": "kill", "rank": 0, "step": 0, **options})
