"""Lightning's own callbacks decide alike on every rank, and as they would in one process."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from tests.conformance.harness import Conformance, assert_ranks_agree, assert_same_weights
from tests.conformance.jobs import Fit, StrategySpec, fit, new_trainer, rank, summary
from tests.conformance.models import Mlp, regression_data


class Validated(Mlp):
    """Validates on 9 samples, which no world size divides."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", (self(x) - y).square().mean(), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(9, seed=5), batch_size=2)

    test_step, test_dataloader = validation_step, val_dataloader


class MonitorDiffers(Mlp):
    """Logs a value that gets worse on rank 0 and better on the others."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = float(self.current_epoch)
        self.log("val", value if rank() == 0 else -value, sync_dist=False)

    val_dataloader = Validated.val_dataloader


@pytest.mark.feature("early_stopping")
def test_early_stopping_stops_after_the_same_epoch(conformance: Conformance) -> None:
    options = {"callbacks": [EarlyStopping("val", patience=1, min_delta=0.05)], "max_epochs": 8}
    got = conformance.same_training(Validated, {"samples": 16}, options)
    assert got[0].steps < 8 * 2


@pytest.mark.feature("early_stopping")
def test_early_stopping_on_a_value_that_differs_by_rank(conformance: Conformance) -> None:
    options = {"callbacks": [EarlyStopping("val", patience=1)], "max_epochs": 5}
    results = conformance.ranks(fit, MonitorDiffers, None, options)
    assert len({result.steps for result in results}) == 1
    assert_ranks_agree(results)


def checkpointed(strategy: StrategySpec, kind: type[Mlp]) -> tuple[str, list[str], float | None, float | None]:
    keep = ModelCheckpoint(
        dirpath="kept", monitor="val", mode="min", save_top_k=2, save_last=True, filename="{epoch}-{val:.3f}"
    )
    trainer = new_trainer(strategy, max_epochs=4, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(kind())
    trainer.strategy.barrier()
    files = sorted(path.name for path in Path("kept").iterdir())
    best = None if keep.best_model_score is None else float(keep.best_model_score)
    tested = None
    if kind is Validated:
        tested = float(trainer.test(ckpt_path="best", verbose=False)[0]["val"])
        trainer.validate(ckpt_path="last", verbose=False)
    return Path(keep.best_model_path).name, files, best, tested


@pytest.mark.feature("model_checkpoint")
def test_checkpoint_keeps_the_best_and_the_last(conformance: Conformance) -> None:
    path, files, best, _ = conformance.plain(checkpointed, Validated)
    for result in conformance.ranks(checkpointed, Validated):
        assert result[:2] == (path, files)
        assert result[2] == pytest.approx(best, rel=1e-5)
        assert result[3] == pytest.approx(best, rel=1e-5)


@pytest.mark.feature("model_checkpoint")
def test_checkpoint_monitor_that_differs_by_rank(conformance: Conformance) -> None:
    results = conformance.ranks(checkpointed, MonitorDiffers)
    assert len({result[0] for result in results}) == 1
    assert results[0][0] in results[0][1]


@pytest.mark.feature("model_checkpoint")
def test_checkpoint_every_few_steps(conformance: Conformance) -> None:
    keep = partial(ModelCheckpoint, dirpath="kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"enable_checkpointing": True, "callbacks": [keep]}
    assert [r.notes for r in conformance.ranks(fit, ListsCheckpoints, None, options)] == [
        ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    ] * conformance.world_size


class ListsCheckpoints(Mlp):
    def on_fit_end(self) -> None:
        self.trainer.strategy.barrier()
        self.notes = sorted(path.name for path in Path("kept").iterdir())


@pytest.mark.feature("weight_averaging")
def test_exponential_moving_average(conformance: Conformance) -> None:
    options = {"callbacks": [partial(EMAWeightAveraging, decay=0.8, update_every_n_steps=1)], "max_epochs": 2}
    conformance.same_training(Mlp, None, options)


@pytest.mark.feature("weight_averaging")
def test_stochastic_weight_averaging(conformance: Conformance) -> None:
    options = {"callbacks": [partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1)], "max_epochs": 3}
    conformance.same_training(Mlp, None, options)


class UnfreezeAtEpoch1(BaseFinetuning):
    """Trains the last layer first, then all: requires_grad changes after the strategy has wrapped the module."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


@pytest.mark.feature("finetuning")
def test_layers_unfrozen_during_training(conformance: Conformance) -> None:
    conformance.same_training(Mlp, {"momentum": 0.0}, {"callbacks": [UnfreezeAtEpoch1()], "max_epochs": 3})


def find_lr(strategy: StrategySpec) -> tuple[list[float], float | None, Fit]:
    module = Mlp()
    trainer = new_trainer(strategy, max_epochs=1)
    finder = Tuner(trainer).lr_find(
        module, num_training=12, min_lr=1e-4, max_lr=0.5, early_stop_threshold=None, update_attr=False
    )
    assert finder is not None
    suggestion = finder.suggestion(skip_begin=2, skip_end=1)
    module.losses.clear()
    trainer.fit(module)
    return finder.results["lr"], suggestion, summary(trainer, module)


@pytest.mark.feature("lr_find")
def test_learning_rate_finder(conformance: Conformance) -> None:
    want = conformance.plain(find_lr)
    for lrs, suggestion, result in conformance.ranks(find_lr):
        assert lrs == want[0]
        assert suggestion == want[1]
        assert_same_weights(result.weights, want[2].weights)


class Plateau(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}

    def on_train_epoch_start(self) -> None:
        self.notes = [*getattr(self, "notes", []), self.optimizers().param_groups[0]["lr"]]


@pytest.mark.feature("reduce_lr_on_plateau")
def test_reduce_lr_on_plateau(conformance: Conformance) -> None:
    want = conformance.plain(fit, Plateau, None, {"max_epochs": 6})
    for result in conformance.same_training(Plateau, None, {"max_epochs": 6}):
        assert result.notes == want.notes
    assert len(set(want.notes)) > 1


class Logged(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        self.logger.experiment.log_metrics({"extra": 1.0})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def logged(strategy: StrategySpec) -> tuple[str | None, list[str], list[str]]:
    trainer = new_trainer(
        strategy,
        logger=CSVLogger(".", name="logs"),
        log_every_n_steps=1,
        max_epochs=2,
        callbacks=[LearningRateMonitor(logging_interval="step")],
    )
    trainer.fit(Logged())
    trainer.strategy.barrier()
    rows = (Path("logs") / "version_0" / "metrics.csv").read_text().splitlines()
    return trainer.log_dir, sorted(path.name for path in Path("logs").iterdir()), rows


@pytest.mark.feature("logging")
def test_one_log_folder_and_one_row_per_step(conformance: Conformance) -> None:
    _, _, want = conformance.plain(logged)
    results = conformance.ranks(logged)
    for folder, folders, rows in results:
        assert folder == results[0][0]
        assert folders == ["version_0"]
        assert rows[0] == want[0]
        assert len(rows) == len(want)


class SlowOnOneRank(Timer):
    """Rank 1 believes that its time is up after two steps; rank 0 never does."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._duration = 0.0 if trainer.global_rank == 1 and trainer.global_step == 2 else 1e6
        super().on_train_batch_end(trainer, *args, **kwargs)


@pytest.mark.feature("timer")
def test_ranks_agree_when_time_is_up(conformance: Conformance) -> None:
    options = {"callbacks": [SlowOnOneRank(timedelta(seconds=1000))], "max_epochs": 2}
    results = conformance.ranks(fit, Mlp, None, options)
    assert len({result.steps for result in results}) == 1
    assert_ranks_agree(results)
    stopped = conformance.ranks(fit, Mlp, None, {"max_time": {"seconds": 0.001}, "max_epochs": 50})
    assert len({result.steps for result in stopped}) == 1
    assert stopped[0].steps < 50 * 6


def find_batch_size(strategy: StrategySpec) -> None:
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, batch_arg_name="batch")
    new_trainer(strategy, callbacks=[finder]).fit(Mlp())


@pytest.mark.feature("batch_size_finder")
def test_batch_size_finder(conformance: Conformance) -> None:
    conformance.ranks(find_batch_size)


class NotesHooks(Callback):
    """The order of hooks that a user's callback may rely on."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name.startswith("on_") or name in ("setup", "teardown"):
            super().__getattribute__("called").append(name)
        return attribute


def hook_order(strategy: StrategySpec) -> list[str]:
    notes = NotesHooks()
    trainer = new_trainer(strategy, callbacks=[notes], num_sanity_val_steps=1)
    module = Validated(samples=16)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return [name for name in notes.called if "batch" not in name or "train" in name]


@pytest.mark.feature("training")
def test_callbacks_see_the_hooks_of_one_process(conformance: Conformance) -> None:
    assert conformance.ranks(hook_order) == [conformance.plain(hook_order)] * conformance.world_size


class LossGoesDown(Mlp):
    """Adam, because everybody uses it; scale errors do not show under it, hence SGD elsewhere."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-6)

    def loss(self, batch: Any, index: int) -> Tensor:
        return super().loss(batch, index)


@pytest.mark.feature("training")
def test_adamw(conformance: Conformance) -> None:
    conformance.same_training(LossGoesDown, None, {"max_epochs": 2}, tolerance=1e-4)
