"""Any module, by automatic optimization: the losses and weights of one process at the same global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.conformance import models
from tests.conformance.harness import Conformance, assert_same_weights
from tests.conformance.jobs import Fit, StrategySpec, fit, new_trainer, summary
from tests.conformance.models import Base, Mlp, regression_data


@pytest.mark.feature("training")
@pytest.mark.parametrize(
    "kind", [models.Mlp, models.Gpt, models.TiedGpt, models.LoraGpt, models.ConvBatchNorm, models.OwnStep]
)
def test_losses_and_weights(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind)


@pytest.mark.feature("training")
def test_tied_weights_stay_one_tensor(conformance: Conformance) -> None:
    for result in conformance.same_training(models.TiedGpt):
        assert torch.equal(result.weights["head.weight"], result.weights["token.weight"])


class Momentless(models.LoraGpt):
    def on_train_end(self) -> None:
        self.notes = len(self.optimizers().state)


@pytest.mark.feature("training")
def test_frozen_parameters_do_not_move_and_have_no_optimizer_state(conformance: Conformance) -> None:
    start = {name: value for name, value in models.LoraGpt().state_dict().items() if not name.endswith((".a", ".b"))}
    results = conformance.same_training(Momentless)
    for name, value in start.items():
        assert torch.equal(results[0].weights[name], value), f"{name} moved"
    assert [result.notes for result in results] == [16] * conformance.world_size


class LateBuilt(Mlp):
    def build(self) -> None:
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            super().build()


@pytest.mark.feature("configure_model")
def test_layers_made_in_configure_model(conformance: Conformance) -> None:
    conformance.same_training(LateBuilt)


class Unlike(Mlp):
    """Ranks start from different weights and buffers, as with an unseeded script: those of rank 0 count."""

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()

    def setup(self, stage: str) -> None:
        self.register_buffer("offset", torch.tensor(float(self.trainer.global_rank)))
        if self.trainer.global_rank > 0:
            for parameter in self.parameters():
                nn.init.normal_(parameter)

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self(batch[0]) + self.offset, batch[1])


@pytest.mark.feature("training")
def test_ranks_start_from_the_weights_of_rank_0(conformance: Conformance) -> None:
    conformance.same_training(Unlike)


@dataclass
class Record:
    x: Any
    y: Any
    key: Any


class Named(NamedTuple):
    x: Any
    y: Any
    key: Any


def as_dict(x: Any, y: Any, key: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "key": key}


def nested(x: Any, y: Any, key: Any) -> tuple[dict[str, Any], list[Any]]:
    return ({"x": x}, [y, {"key": key, "none": None}])


class AnyBatch(Mlp):
    """Takes batches of any type, and checks that they arrive as the loader made them."""

    def __init__(self, make: Any, **options: Any) -> None:
        self.make = make
        super().__init__(**options)

    def train_dataloader(self) -> Any:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
            x, y = (torch.stack(column) for column in zip(*samples, strict=True))
            return self.make(x, y, [f"sample {value:.3f}" for value in x[:, 0].tolist()])

        return DataLoader(self.dataset(), batch_size=self.local_batch, collate_fn=collate)

    def loss(self, batch: Any, index: int) -> Tensor:
        if isinstance(batch, Mapping):
            x, y, key = batch["x"], batch["y"], batch["key"]
        elif isinstance(batch, (Record, Named)):
            x, y, key = batch.x, batch.y, batch.key
        else:
            x, y, key = batch[0]["x"], batch[1][0], batch[1][1]["key"]
        expected = self.make(0, 0, 0)
        if type(batch) is not type(expected) or key != [f"sample {value:.3f}" for value in x[:, 0].tolist()]:
            raise TypeError(f"batch arrived as {batch}")
        return F.mse_loss(self(x), y)


@pytest.mark.feature("batch_types")
@pytest.mark.parametrize("make", [as_dict, Record, Named, nested])
@pytest.mark.parametrize("samples", [32, pytest.param(29, marks=pytest.mark.long)])
def test_batches_of_any_type(conformance: Conformance, make: Any, samples: int) -> None:
    conformance.same_training(AnyBatch, {"make": make, "samples": samples}, losses=samples % 8 == 0)


class Buffers(Mlp):
    def build(self) -> None:
        super().build()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("decay", torch.ones(2))
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.register_buffer("nothing", None)

    def loss(self, batch: Any, index: int) -> Tensor:
        self.count += 1
        self.seen[index % 3] = True
        self.decay.mul_(0.5)
        self.scratch = self.scratch + 1
        self.notes = float(self.scratch)
        return super().loss(batch, index) * self.decay.sum().clamp(min=0.5)


@pytest.mark.feature("buffers")
def test_buffers_are_trained_with_and_stored(conformance: Conformance) -> None:
    results = conformance.same_training(Buffers)
    assert [result.notes for result in results] == [7.0] * conformance.world_size
    assert "scratch" not in results[0].weights


class LocalStatistic(Mlp):
    """A buffer that each rank updates from its own samples, like the running mean of a BatchNorm."""

    def build(self) -> None:
        super().build()
        self.register_buffer("mean", torch.zeros(()))
        self.notes: list[float] = []

    def loss(self, batch: Any, index: int) -> Tensor:
        self.mean.lerp_(batch[0].mean(), 0.1)
        return super().loss(batch, index)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.mean.item())

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(8), batch_size=2)


@pytest.mark.feature("buffers")
def test_ranks_validate_with_the_same_buffers(conformance: Conformance) -> None:
    results = conformance.ranks(fit, LocalStatistic)
    assert len(set(results[0].notes)) == 1
    assert all(set(result.notes) == set(results[0].notes) for result in results)


class AlternateBranch(Mlp):
    """One head takes part in odd steps only."""

    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(8, 1)

    def loss(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x) + (self.extra(x) if index % 2 else 0), y)


class RoutedBranch(AlternateBranch):
    """One head takes part on those ranks only whose samples it is meant for."""

    def loss(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        chosen = x[:, 0] > 1.0
        out = self(x)
        if chosen.any():
            out = torch.where(chosen[:, None], out + self.extra(x), out)
        return F.mse_loss(out, y)


class NeverUsed(AlternateBranch):
    """A head that takes part in no step; without a gradient it must not even decay."""

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=0.1)


@pytest.mark.feature("unused_parameters")
@pytest.mark.parametrize("kind", [AlternateBranch, RoutedBranch, NeverUsed])
def test_unused_parameters(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind, {"samples": 64}, losses=kind is not RoutedBranch)


@pytest.mark.feature("unused_parameters")
@pytest.mark.parametrize("kind", [AlternateBranch, RoutedBranch])
def test_unused_parameters_while_accumulating(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind, {"samples": 64}, {"accumulate_grad_batches": 3})


class SkipsSteps(Mlp):
    """Returns None for some batches, as users do for a batch they do not like."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4) else super().training_step(batch, batch_idx)


@pytest.mark.feature("skipped_steps")
def test_training_step_may_return_none_on_all_ranks(conformance: Conformance) -> None:
    conformance.same_training(SkipsSteps)


class Squares(Dataset[Any]):
    """A dataset with its own ``__getitem__`` and no torch base type inside."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        x, y = regression_data(32)[index]
        return x.numpy(), float(y)


class NumpyDataset(Mlp):
    def dataset(self) -> Dataset[Any]:
        return Squares()

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1].float()[:, None])


@pytest.mark.feature("batch_types")
def test_numpy_samples_and_numbers(conformance: Conformance) -> None:
    conformance.same_training(NumpyDataset)


def fit_compiled(strategy: StrategySpec) -> Fit:
    module = Mlp()
    trainer = new_trainer(strategy)
    trainer.fit(torch.compile(module, backend="aot_eager"))
    return summary(trainer, module)


@pytest.mark.feature("compile")
def test_compiled_module(conformance: Conformance) -> None:
    got = conformance.ranks(fit_compiled, timeout=110.0)
    want = conformance.plain(fit, Mlp)
    assert_same_weights(got[0].weights, want.weights)


@pytest.mark.feature("sync_batchnorm_cpu")
def test_sync_batchnorm_needs_a_gpu(conformance: Conformance) -> None:
    conformance.ranks(fit, models.ConvBatchNorm, {}, {"sync_batchnorm": True})
    pytest.fail("torch has SyncBatchNorm on GPUs only, yet training on CPUs was not refused")
