"""Stop anywhere, go on with other ranks and workers: the samples continue as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llmscale.data import WebDatasetDataModule
from tests.support.pool import RankPool
from tests.unit.data.archives import flat, write_numbered

COUNTS = [7, 31, 12, 1, 25, 18, 40, 9]  # 143 samples: 11 batches of 12, and 11 left over
BATCH = 12
BATCHES = sum(COUNTS) // BATCH


class Recorder(LightningModule):
    """Remembers the numbers of the samples it is trained on, and what each optimizer step saw."""

    def __init__(self, estimate: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.estimate = estimate
        self.steps: list[list[int]] = []
        self.window: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.window += batch["cls"].tolist()
        return self.layer(torch.ones(1)).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.append(self.window)
        self.window = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("count", float(len(batch["cls"])), reduce_fx="sum", sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.estimate:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 1e-9)


class SaveAt(Callback):
    """Saves after a number of batches of the run, at the end of an epoch, inside validation, or at the end."""

    def __init__(self, moment: str, batches: int, path: Path) -> None:
        self.moment, self.batches, self.path, self.seen = moment, batches, path, 0
        self.steps = -1

    def save(self, trainer: Trainer) -> None:
        if self.steps < 0:
            trainer.save_checkpoint(self.path)
            self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen += 1
        if self.moment == "batch" and self.seen == self.batches:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.moment == "epoch":
            self.save(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.moment == "validation" and self.seen == self.batches:
            self.save(trainer)

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        if self.moment == "fit_end":
            self.save(trainer)


def trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"max_epochs": 3, **options},
    )


def datamodule(shards: list[str], **options: Any) -> WebDatasetDataModule:
    return WebDatasetDataModule(train=shards, **{"global_batch_size": BATCH, "seed": 5, **options})


CASES = [
    ("batch", 5, 1, False, "drop"),
    ("batch", 5, 1, True, "drop"),
    ("batch", BATCHES, 1, False, "drop"),
    ("batch", BATCHES + 4, 1, True, "drop"),
    ("batch", 2, 4, False, "drop"),
    ("batch", 6, 4, False, "drop"),
    ("batch", BATCHES - 1, 4, True, "drop"),
    ("batch", BATCHES + 3, 4, False, "drop"),
    ("epoch", 0, 1, False, "drop"),
    ("epoch", 0, 4, True, "drop"),
    ("validation", 4, 1, False, "drop"),
    ("validation", 6, 4, True, "drop"),
    ("fit_end", 0, 1, False, "drop"),
    ("batch", BATCHES + 7, 4, False, "pad"),
    ("epoch", 0, 4, False, "pad"),
    ("batch", BATCHES + 7, 4, False, "continuous"),
    ("epoch", 0, 1, True, "continuous"),
]  # moment, batches, accumulate, estimate, end
WITH_WORKERS = [CASES[5], CASES[9], CASES[10]]


@pytest.mark.parametrize(
    ("workers", "moment", "batches", "accumulate", "estimate", "end"),
    [(0, *case) for case in CASES]
    + [pytest.param(2, *case, marks=() if case in WITH_WORKERS else pytest.mark.long) for case in CASES],
)
def test_a_resumed_run_takes_the_same_optimizer_steps(
    tmp_path: Path, workers: int, moment: str, batches: int, accumulate: int, estimate: bool, end: str
) -> None:
    shards = write_numbered(tmp_path / "shards", COUNTS)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    data: dict[str, Any] = {"epoch_end": end}
    if moment == "validation":
        options["val_check_interval"] = 2
        data["val"] = shards[:2]
    save = SaveAt(moment, batches, tmp_path / "saved.ckpt")
    whole = Recorder(estimate)
    first = dict(options)
    if moment == "fit_end":
        first["max_epochs"] = 1
    trainer(tmp_path, callbacks=[save], **first).fit(whole, datamodule(shards, **data))
    if moment == "fit_end":
        whole = Recorder(estimate)
        trainer(tmp_path, **options).fit(whole, datamodule(shards, **data))

    resumed, again = Recorder(estimate), trainer(tmp_path, **options)
    again.fit(resumed, datamodule(shards, num_workers=workers, **data), ckpt_path=save.path, weights_only=False)

    assert resumed.steps == whole.steps[save.steps :]
    assert again.global_step == len(whole.steps)


def fit_rank(shards: list[str], folder: Path, devices: int, save: SaveAt | None, workers: int, batch: int) -> Any:
    """Train one rank; returns what each of its optimizer steps saw, and the last validation's number of samples."""
    callbacks: list[Callback] = [save] if save else []
    module = Recorder()
    run = trainer(folder, devices=devices, strategy="ddp", accumulate_grad_batches=3, max_epochs=2, callbacks=callbacks)
    data = datamodule(shards, val=shards[:3], num_workers=workers, global_batch_size=batch)
    path = folder / "saved.ckpt"
    run.fit(module, data, ckpt_path=path if save is None else None, weights_only=False)
    return module.steps, run.callback_metrics["count"].item()


def joined(ranks: list[Any]) -> list[list[int]]:
    return [sorted(flat(parts)) for parts in zip(*(steps for steps, _ in ranks), strict=True)]


@pytest.mark.parametrize(("before", "after", "workers", "batches"), [(2, 1, 1, 7), (1, 2, 0, BATCHES + 6)])
def test_a_run_continues_on_another_number_of_ranks(
    tmp_path: Path, pool1: RankPool, pool2: RankPool, before: int, after: int, workers: int, batches: int
) -> None:
    shards = write_numbered(tmp_path / "shards", COUNTS)
    pools = {1: pool1, 2: pool2}
    whole = pools[before].run(
        fit_rank, shards, tmp_path, before, SaveAt("batch", batches, tmp_path / "saved.ckpt"), 0, BATCH
    )
    rest = pools[after].run(fit_rank, shards, tmp_path, after, None, workers, BATCH)
    steps = (batches % BATCHES) // 3 + (batches // BATCHES) * -(-BATCHES // 3)
    assert joined(rest) == joined(whole)[steps:]
    assert {len(step) for step in joined(whole)} == {3 * BATCH, 2 * BATCH}
    assert [count for _, count in [*whole, *rest]] == [sum(COUNTS[:3])] * (before + after)
