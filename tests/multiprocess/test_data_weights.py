"""Ranks that hold different numbers of items train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.errors import ConfigurationError
from tests.support.pool import RankPool
from tests.unit.data.archives import random_texts, write_numbered, write_texts


class Fitted(LightningModule):
    """A mean over samples, or over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(257, 257)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if "labels" in batch:
            logits = self.table(batch["input_ids"]).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()) + 0 * self.layer.bias.sum()
        numbers = batch["cls"].float()[:, None] / 100
        return (self.layer(numbers) - numbers.square()).square().mean() + 0 * self.table.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit(folder: Path, shards: list[str], devices: int, strategy: str, options: dict[str, Any]) -> list[torch.Tensor]:
    import lightning_llmscale  # noqa: F401  (registers the strategy's name)

    module = Fitted()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, WebDatasetDataModule(train=shards, **options))
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", ["samples", "sequences"])
def test_uneven_parts_give_the_weights_of_one_process(
    tmp_path: Path, pool1: RankPool, pool2: RankPool, kind: str
) -> None:
    if kind == "samples":
        shards = write_numbered(tmp_path / "shards", [13, 8])  # 21 in batches of 5: the last has 1 for 2 ranks
        options: dict[str, Any] = {"global_batch_size": 5, "epoch_end": "pad"}
    else:
        shards = write_texts(tmp_path / "shards", random_texts(0, 3))
        options = {"global_batch_size": 7, "epoch_end": "pad", "seq_len": 50}
    (one,) = pool1.run(fit, tmp_path, shards, 1, "auto", options)
    ranks = pool2.run(fit, tmp_path, shards, 2, "ring_allreduce", options)
    for ours in ranks:
        for parameter, expected in zip(ours, one, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 5}, "global_batch_size=5 does not divide by 2 ranks; use 4 or 6"),
        ({"global_batch_size": 4, "epoch_end": "pad"}, "epoch_end='pad' gives ranks unequal parts"),
        ({"global_batch_size": 1}, "global_batch_size=1 is smaller than the number of ranks, 2"),
    ],
)
def test_strategies_that_weight_ranks_alike_are_told_so(
    tmp_path: Path, pool2: RankPool, options: dict[str, Any], message: str
) -> None:
    shards = write_numbered(tmp_path / "shards", [13, 8])
    for error in pool2.errors(fit, tmp_path, shards, 2, "ddp", options):
        assert error.is_a(ConfigurationError)
        assert message in error.message
