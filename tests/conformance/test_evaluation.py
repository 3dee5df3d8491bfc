"""Evaluation counts every sample once, whatever the split, and every rank knows the same metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.conformance.harness import Conformance
from tests.conformance.jobs import StrategySpec, fit, new_trainer, rank
from tests.conformance.models import Mlp, regression_data


class Squares(Mlp):
    """Evaluates on the squares 0, 1, 4, ... and logs their mean, sum and maximum in every way Lightning has."""

    def __init__(self, count: int, batch: int) -> None:
        super().__init__()
        self.count, self.eval_batch = count, batch
        self.mean, self.sum = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.values = torchmetrics.CatMetric()

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(float(self.count)) ** 2), batch_size=self.eval_batch)

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("mean", x.mean(), sync_dist=True)
        self.log("mean_by_size", x.mean(), sync_dist=True, batch_size=len(x))
        self.log("step_and_epoch", x.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("sum", x.sum(), sync_dist=True, reduce_fx="sum")
        self.log("max", x.max(), sync_dist=True, reduce_fx="max")
        self.log("min", x.min(), sync_dist=True, reduce_fx="min")
        self.mean(x)
        self.sum(x)
        self.values(x)
        self.log("metric_mean", self.mean)
        self.log_dict({"metric_sum": self.sum})

    def on_validation_epoch_end(self) -> None:
        gathered = torch.as_tensor(self.values.compute())
        self.log("by_hand", gathered.sum(), rank_zero_only=False)
        self.values.reset()

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0]


def evaluate(strategy: StrategySpec, sizes: list[tuple[int, int]]) -> list[tuple[dict[str, float], dict[str, float]]]:
    results = []
    for count, batch in sizes:
        module, trainer = Squares(count, batch), new_trainer(strategy)
        validated = trainer.validate(module, verbose=False)[0]
        results.append((dict(validated), dict(trainer.test(module, verbose=False)[0])))
    return results


def expected_metrics(count: int) -> dict[str, float]:
    x = torch.arange(float(count)) ** 2
    mean, total = x.mean().item(), x.sum().item()
    return {
        "mean": mean,
        "mean_by_size": mean,
        "step_and_epoch_epoch": mean,
        "sum": total,
        "max": x.max().item(),
        "min": 0.0,
        "metric_mean": mean,
        "metric_sum": total,
    }


@pytest.mark.feature("exact_metrics")
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_metrics_are_exact_for_any_number_of_samples(conformance: Conformance, batch: int) -> None:
    sizes = [(count, batch) for count in range(1, 10)]
    wrong = []
    for r, results in enumerate(conformance.ranks(evaluate, sizes)):
        for (count, _), (validated, tested) in zip(sizes, results, strict=True):
            want = expected_metrics(count)
            wrong += [
                f"rank {r}, {count} samples: {name} is {found.get(name)}, want {value}"
                for found in (validated, tested)
                for name, value in want.items()
                if found.get(name) != pytest.approx(value, rel=1e-6)
            ]
            if validated["by_hand"] != pytest.approx(want["sum"], rel=1e-6):
                wrong.append(f"rank {r}, {count} samples: CatMetric by hand sums to {validated['by_hand']}")
    assert not wrong, "\n".join(wrong[:10])


class SeveralValidationLoaders(Mlp):
    sizes = (5, 3, 1)

    def val_dataloader(self) -> Any:
        return [
            DataLoader(TensorDataset(torch.arange(float(n)) + 10 * i), batch_size=2) for i, n in enumerate(self.sizes)
        ]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("mean", batch[0].mean(), sync_dist=True)
        self.log("count", float(len(batch[0])), sync_dist=True, reduce_fx="sum", add_dataloader_idx=True)

    test_dataloader, test_step = val_dataloader, validation_step


def fit_then_test(strategy: StrategySpec) -> tuple[dict[str, float], list[dict[str, float]]]:
    module = SeveralValidationLoaders()
    trainer = new_trainer(strategy, num_sanity_val_steps=2)
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, [dict(result) for result in trainer.test(module, verbose=False)]


@pytest.mark.feature("several_validation_loaders")
def test_several_validation_loaders(conformance: Conformance) -> None:
    want = {}
    for i, size in enumerate(SeveralValidationLoaders.sizes):
        want[f"mean/dataloader_idx_{i}"] = 10 * i + (size - 1) / 2
        want[f"count/dataloader_idx_{i}"] = float(size)
    for validated, tested in conformance.ranks(fit_then_test):
        assert validated == pytest.approx(want)
        assert {name: value for part in tested for name, value in part.items()} == pytest.approx(want)


class StreamedNumbers(IterableDataset[Any]):
    """Rank ``r`` streams ``sizes[r]`` numbers of its own."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def numbers(self, of_rank: int) -> list[float]:
        return [100.0 * of_rank + i for i in range(self.sizes[of_rank])]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers(rank()))


class ValidatesStreams(Mlp):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes

    def val_dataloader(self) -> Any:
        return DataLoader(StreamedNumbers(self.sizes), batch_size=2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch.mean(), sync_dist=True)
        self.log("sum", batch.sum(), sync_dist=True, reduce_fx="sum")


@pytest.mark.feature("exact_metrics")
@pytest.mark.parametrize("sizes", [(5, 3), (5, 0), (0, 5)])
def test_streams_of_different_lengths_are_validated_exactly(conformance: Conformance, sizes: tuple[int, int]) -> None:
    of_ranks = sizes * (conformance.world_size // 2)
    numbers = [x for r in range(conformance.world_size) for x in StreamedNumbers(of_ranks).numbers(r)]
    want = {"mean": sum(numbers) / len(numbers), "sum": sum(numbers)}
    for result in conformance.ranks(fit, ValidatesStreams, {"sizes": of_ranks}):
        assert result.metrics == pytest.approx(want, rel=1e-6)


class LogsOnSomeRanks(Mlp):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if rank() == 0:
            self.log("only_first", 3.0, sync_dist=True)
        else:
            self.log("only_others", 5.0, sync_dist=True)
        self.log("all", float(rank()), sync_dist=True)
        if rank() == 0:
            self.log("local", 7.0, rank_zero_only=True)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(16), batch_size=4)


@pytest.mark.feature("metrics_of_some_ranks")
def test_metric_logged_by_some_ranks_is_their_mean(conformance: Conformance) -> None:
    for result in conformance.ranks(fit, LogsOnSomeRanks):
        expected = {"only_first": 3.0, "only_others": 5.0, "all": (conformance.world_size - 1) / 2}
        assert {name: result.metrics.get(name) for name in expected} == pytest.approx(expected)


class TrainMetrics(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss


@pytest.mark.feature("exact_metrics")
@pytest.mark.parametrize("samples", [48, 45])
def test_epoch_mean_of_a_training_metric(conformance: Conformance, samples: int) -> None:
    want = conformance.plain(fit, TrainMetrics, {"samples": samples}).metrics
    for result in conformance.ranks(fit, TrainMetrics, {"samples": samples}):
        assert result.metrics["loss_epoch"] == pytest.approx(want["loss_epoch"], rel=1e-5)
        assert result.metrics["count"] == samples


def predict(strategy: StrategySpec, count: int) -> list[float]:
    module, trainer = Squares(count, 2), new_trainer(strategy)
    return [value for batch in trainer.predict(module) or [] for value in batch.tolist()]


@pytest.mark.feature("predict")
@pytest.mark.parametrize("count", [8, 7, 4])
def test_predictions_cover_each_sample_once(conformance: Conformance, count: int) -> None:
    together = [value for part in conformance.ranks(predict, count) for value in part]
    assert sorted(together) == [float(i * i) for i in range(count)]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__(write_interval="batch_and_epoch")
        self.batches: list[list[int]] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        self.batches.append(list(indices))
        if [float(i * i) for i in indices] != prediction.tolist():
            raise ValueError(f"indices {indices} do not belong to the predictions {prediction}")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = [index for loader in batch_indices for batch in loader for index in batch]


def predict_and_write(strategy: StrategySpec) -> tuple[list[list[int]], list[int]]:
    writer = Writer()
    trainer = new_trainer(strategy, callbacks=[writer])
    trainer.predict(Squares(7, 2), return_predictions=False)
    return writer.batches, writer.epoch


@pytest.mark.feature("predict")
def test_prediction_writer_gets_the_indices_of_its_samples(conformance: Conformance) -> None:
    results = conformance.ranks(predict_and_write)
    assert sorted(i for batches, _ in results for batch in batches for i in batch) == list(range(7))
    assert sorted(i for _, epoch in results for i in epoch) == list(range(7))


class GathersByHand(Mlp):
    """Uses the module's own collectives."""

    def on_train_epoch_end(self) -> None:
        gathered = self.all_gather({"rank": torch.tensor(float(self.global_rank)), "pair": torch.ones(2)})
        reduced = self.trainer.strategy.reduce(torch.tensor(float(self.global_rank)), reduce_op="sum")
        sent = self.trainer.strategy.broadcast({"from": self.global_rank})
        decided = self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        self.notes = (gathered["rank"].tolist(), tuple(gathered["pair"].shape), float(reduced), sent["from"], decided)


@pytest.mark.feature("collectives_by_hand")
def test_collectives_by_hand(conformance: Conformance) -> None:
    n = conformance.world_size
    want = ([float(r) for r in range(n)], (n, 2), n * (n - 1) / 2, 0, True)
    assert [result.notes for result in conformance.ranks(fit, GathersByHand)] == [want] * n


class CountsValidation(Mlp):
    def build(self) -> None:
        super().build()
        self.notes: list[tuple[int, int]] = []

    def on_validation_start(self) -> None:
        self.notes.append((self.current_epoch, self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, batch_idx), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(9, seed=5), batch_size=2)


@pytest.mark.feature("validation_schedule")
@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2, "max_epochs": 2},
        {"val_check_interval": 0.5, "max_epochs": 2},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
        {"check_val_every_n_epoch": 2, "max_epochs": 4},
        {"num_sanity_val_steps": -1},
        {"limit_val_batches": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_validation_when_one_process_validates(conformance: Conformance, options: dict[str, Any]) -> None:
    limited = "limit_val_batches" in options
    want = conformance.plain(fit, CountsValidation, None, options)
    for result in conformance.same_training(CountsValidation, None, options):
        assert result.notes == want.notes
        if not limited:  # a limit counts batches of each rank
            assert result.metrics == pytest.approx(want.metrics, rel=1e-5)
