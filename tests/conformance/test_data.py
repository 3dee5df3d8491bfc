"""The user's own loaders: same samples, same order, same batches as in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_llmscale.errors import UnevenDataError
from tests.conformance.harness import Conformance, assert_ranks_agree, assert_same_weights
from tests.conformance.jobs import Fit, StrategySpec, fit, new_trainer, rank, summary
from tests.conformance.models import Base, Mlp, regression_data


class Indexed(Mlp):
    """Notes the indices of the samples of every batch.

    Args:
        loader: Makes the training loader from the dataset and the local batch size.
        seed: Given to ``seed_everything`` before the loader is made.
    """

    def __init__(self, loader: Any, seed: int | None = None, **options: Any) -> None:
        self.loader, self.seed = loader, seed
        super().__init__(**options)
        self.notes: list[list[int]] = []

    def dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(self.samples), *regression_data(self.samples).tensors)

    def train_dataloader(self) -> Any:
        if self.seed is not None:
            seed_everything(self.seed, verbose=False)
        return self.loader(self.dataset(), self.local_batch)

    def loss(self, batch: Any, index: int) -> Tensor:
        self.notes.append(batch[0].tolist())
        return super().loss(batch[1:], index)


def assert_same_samples(got: list[Fit], want: Fit) -> None:
    """In every step the ranks together see exactly the samples that one process sees."""
    for step, truth in enumerate(want.notes):
        together = [index for result in got for index in result.notes[step]]
        assert sorted(together) == sorted(truth), f"step {step}: ranks see {together}, one process {truth}"
    assert {len(result.notes) for result in got} == {len(want.notes)}


def in_order(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch)


def in_order_dropping(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch, drop_last=True)


def shuffled(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch, shuffle=True)


def shuffled_by_generator(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(5))


def weighted(dataset: Dataset[Any], batch: int) -> Any:
    weights = torch.arange(1.0, len(dataset) + 1)  # type: ignore[arg-type]
    sampler = WeightedRandomSampler(weights, num_samples=24, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


class EveryOther(Sampler[int]):
    """A user's own sampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter([*range(1, self.size, 2), *range(0, self.size, 2)])

    def __len__(self) -> int:
        return self.size


def own_sampler(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch, sampler=EveryOther(len(dataset)))  # type: ignore[arg-type]


def with_workers(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_size=batch, num_workers=2, persistent_workers=True)


@pytest.mark.feature("sample_order")
@pytest.mark.parametrize(
    "loader", [in_order, in_order_dropping, shuffled, shuffled_by_generator, weighted, own_sampler, with_workers]
)
def test_order_of_one_process(conformance: Conformance, loader: Any) -> None:
    module = {"loader": loader, "seed": 3, "samples": 32}
    got = conformance.same_training(Indexed, module, {"max_epochs": 2})
    assert_same_samples(got, conformance.plain(fit, Indexed, module, {"max_epochs": 2}))


@pytest.mark.feature("sample_order")
@pytest.mark.parametrize("loader", [in_order, in_order_dropping, shuffled])
def test_order_of_one_process_when_samples_do_not_divide(conformance: Conformance, loader: Any) -> None:
    module = {"loader": loader, "seed": 3, "samples": 30 if loader is not in_order_dropping else 31}
    got = conformance.same_training(Indexed, module, {"max_epochs": 2}, losses=False)
    assert_same_samples(got, conformance.plain(fit, Indexed, module, {"max_epochs": 2}))


@pytest.mark.feature("sample_order")
def test_shuffling_differs_by_epoch_and_repeats_with_the_seed(conformance: Conformance) -> None:
    module, options = {"loader": shuffled, "seed": 3, "samples": 32}, {"max_epochs": 2}
    first, again = (conformance.ranks(fit, Indexed, module, options) for _ in range(2))
    other = conformance.ranks(fit, Indexed, {**module, "seed": 4}, options)
    assert [r.notes for r in first] == [r.notes for r in again]
    assert [r.notes for r in first] != [r.notes for r in other]
    assert first[0].notes[:4] != first[0].notes[4:]


class PairBatches(BatchSampler):
    """A user's own batch sampler: batches of consecutive samples, the even ones first."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter(batches[::2] + batches[1::2])


def own_batch_sampler(dataset: Dataset[Any], batch: int) -> Any:
    return DataLoader(dataset, batch_sampler=PairBatches(SequentialSampler(dataset), batch, drop_last=False))  # type: ignore[arg-type]


@pytest.mark.feature("batch_sampler")
def test_own_batch_sampler_uses_each_sample_once(conformance: Conformance) -> None:
    results = conformance.ranks(fit, Indexed, {"loader": own_batch_sampler, "samples": 32})
    seen = [index for result in results for batch in result.notes for index in batch]
    assert sorted(seen) == list(range(32))
    assert_ranks_agree(results)


def split_by_hand(dataset: Dataset[Any], batch: int) -> Any:
    """A loader that the user already split over the ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return DataLoader(dataset, batch_size=batch)
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


@pytest.mark.feature("user_sharded_data")
def test_distributed_sampler_of_the_user_is_kept(conformance: Conformance) -> None:
    module = {"loader": split_by_hand, "samples": 32}
    got = conformance.same_training(Indexed, module)
    assert_same_samples(got, conformance.plain(fit, Indexed, module, None))


@pytest.mark.feature("user_sharded_data")
def test_without_distributed_sampler_every_rank_reads_everything(conformance: Conformance) -> None:
    results = conformance.ranks(fit, Indexed, {"loader": in_order, "samples": 32}, {"use_distributed_sampler": False})
    for result in results:
        assert [index for batch in result.notes for index in batch] == list(range(32))
    assert_ranks_agree(results)


class Streamed(IterableDataset[Any]):
    """What rank r of R streams of the global data: in turn ``batch`` samples for each rank, ``sizes[r]`` in all."""

    def __init__(self, batch: int, sizes: tuple[int, ...]) -> None:
        self.batch, self.sizes = batch, sizes

    def __iter__(self) -> Iterator[Any]:
        mine, ranks = rank(), len(self.sizes)
        x, y = regression_data(256).tensors
        for i in range(self.sizes[mine]):
            index = (i // self.batch * ranks + mine) * self.batch + i % self.batch
            yield index, x[index], y[index]


class StreamLoader:
    """Loader of a stream, and in one process of the same global batches.

    Args:
        sizes: Samples that each rank streams.
        steps: Global batches that all ranks can take part in.
    """

    def __init__(self, sizes: tuple[int, ...], steps: int) -> None:
        self.sizes, self.steps = sizes, steps

    def __call__(self, dataset: Dataset[Any], batch: int) -> Any:
        ranks = len(self.sizes)
        if batch == 4:
            return DataLoader(Streamed(4, self.sizes), batch_size=4)
        batches = [
            [(step * ranks + r) * 4 + i for r in range(ranks) for i in range(min(4, max(self.sizes[r] - step * 4, 0)))]
            for step in range(self.steps)
        ]
        return DataLoader(dataset, batch_sampler=batches)  # type: ignore[arg-type]


UNEVEN = [((20, 12), 3), ((12, 20), 3), ((12, 10), 3), ((12, 4), 1), ((9, 12), 3)]


def sizes_for(world_size: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    return sizes * (world_size // 2)


@pytest.mark.feature("uneven_drop")
@pytest.mark.parametrize(("sizes", "steps"), UNEVEN)
def test_uneven_streams_train_on_what_all_ranks_have(
    conformance: Conformance, sizes: tuple[int, int], steps: int
) -> None:
    loader = StreamLoader(sizes_for(conformance.world_size, sizes), steps)
    module = {"loader": loader, "samples": 96, "batch": 4 * conformance.world_size}
    got = conformance.ranks(fit, Indexed, module, {"max_epochs": 2})
    want = conformance.plain(fit, Indexed, module, {"max_epochs": 2})
    assert {result.steps for result in got} == {want.steps} == {2 * steps}
    assert_same_weights(got[0].weights, want.weights)
    assert_ranks_agree(got)


@pytest.mark.feature("uneven_error")
@pytest.mark.parametrize(("sizes", "short"), [((20, 12), 1), ((12, 20), 0)])
def test_uneven_streams_stop_with_an_error_that_names_the_rank(
    conformance: Conformance, sizes: tuple[int, int], short: int
) -> None:
    strict = conformance.with_options(uneven="error")
    loader = StreamLoader(sizes_for(conformance.world_size, sizes), 3)
    module = {"loader": loader, "samples": 96, "batch": 4 * conformance.world_size}
    for error in strict.refused("ran out of batches", fit, Indexed, module):
        assert error.is_a(UnevenDataError), error.traceback
        named = {int(number) for number in re.findall(r"\d+", error.message.split("ran out")[0])}
        assert named == set(range(short, conformance.world_size, 2)), error.message


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x, y = regression_data(8).tensors
        while True:
            yield from zip(x, y, strict=True)


class EndlessModule(Mlp):
    def build(self) -> None:
        super().build()
        self.notes = 0

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), batch_size=4)

    val_dataloader = train_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes += 1
        self.log("val", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit_endless(strategy: StrategySpec) -> tuple[int, float, int]:
    module = EndlessModule()
    trainer = new_trainer(
        strategy, max_steps=6, max_epochs=-1, limit_train_batches=4, limit_val_batches=2, val_check_interval=2
    )
    trainer.fit(module)
    return trainer.global_step, module.estimated, module.notes


@pytest.mark.feature("iterable_data")
def test_endless_stream_with_limits(conformance: Conformance) -> None:
    assert conformance.ranks(fit_endless) == [(6, 6, 6)] * conformance.world_size


class SeveralLoaders(Mlp):
    """Trains on two loaders of different lengths at once."""

    def __init__(self, mode: str | None, **options: Any) -> None:
        self.mode = mode
        super().__init__(**options)

    def train_dataloader(self) -> Any:
        loaders = {
            "a": DataLoader(regression_data(24), batch_size=self.local_batch),
            "b": DataLoader(regression_data(16, seed=1), batch_size=self.local_batch),
        }
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)

    def loss(self, batch: Any, index: int) -> Tensor:
        if isinstance(batch, dict):
            return sum(super(SeveralLoaders, self).loss(b, index) for b in batch.values() if b is not None)  # type: ignore[return-value]
        return super().loss(batch, index)


@pytest.mark.feature("several_train_loaders")
@pytest.mark.parametrize("mode", [None, "min_size", "max_size_cycle", "max_size"])
def test_several_training_loaders(conformance: Conformance, mode: str | None) -> None:
    conformance.same_training(SeveralLoaders, {"mode": mode}, {"max_epochs": 2})


class Reloading(Indexed):
    """Makes a loader of other samples in each epoch."""

    def train_dataloader(self) -> Any:
        first = self.current_epoch * 8
        return in_order(torch.utils.data.Subset(self.dataset(), range(first, first + 16)), self.local_batch)


@pytest.mark.feature("sample_order")
def test_loaders_reloaded_each_epoch(conformance: Conformance) -> None:
    module, options = {"loader": None, "samples": 48}, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    got = conformance.same_training(Reloading, module, options)
    assert_same_samples(got, conformance.plain(fit, Reloading, module, options))


@pytest.mark.feature("limits")
@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3, "max_epochs": 2},
        {"limit_train_batches": 0.5, "max_epochs": 2},
        {"overfit_batches": 2, "max_epochs": 3},
        {"fast_dev_run": 2},
        {"max_steps": 5, "max_epochs": -1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_limits(conformance: Conformance, options: dict[str, Any]) -> None:
    module = {"loader": in_order, "samples": 32}
    got = conformance.same_training(Indexed, module, options)
    assert_same_samples(got, conformance.plain(fit, Indexed, module, options))


def fit_given_loader(strategy: StrategySpec) -> Fit:
    """The loader is passed to fit, not made by the module."""
    module: Base = Mlp()
    trainer = new_trainer(strategy)
    trainer.fit(module, DataLoader(regression_data(48), batch_size=8 // trainer.world_size))
    return summary(trainer, module)


@pytest.mark.feature("sample_order")
def test_loader_passed_to_fit(conformance: Conformance) -> None:
    got = conformance.ranks(fit_given_loader)
    assert_same_weights(got[0].weights, conformance.plain(fit_given_loader).weights)
