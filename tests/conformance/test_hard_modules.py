"""Modules that are hard on a wrapper: recomputed activations, several closures per step, unusual parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.conformance.harness import Conformance, assert_same_weights
from tests.conformance.jobs import fit
from tests.conformance.models import Base, ConvBatchNorm, Gpt, Mlp, regression_data, token_data


class Recomputing(Gpt):
    """Activation checkpointing of every block."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x) + self.position
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(self.norm(hidden))


class RecomputingReentrant(Recomputing):
    reentrant = True


@pytest.mark.feature("activation_checkpointing")
@pytest.mark.parametrize("kind", [Recomputing, RecomputingReentrant])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_activation_checkpointing(conformance: Conformance, kind: type[Base], accumulate: int) -> None:
    conformance.same_training(kind, None, {"accumulate_grad_batches": accumulate})


class Lbfgs(Mlp):
    """An optimizer that calls its closure, and so training_step and backward, several times per batch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.feature("closures")
@pytest.mark.parametrize("samples", [32, 29])
def test_optimizer_with_several_closures_per_step(conformance: Conformance, samples: int) -> None:
    module, options = {"samples": samples}, {"max_epochs": 2}
    got = conformance.ranks(fit, Lbfgs, module, options)
    want = conformance.plain(fit, Lbfgs, module, options)
    assert_same_weights(got[0].weights, want.weights, tolerance=1e-4)


class GradientPenalty(Base):
    """A Wasserstein critic with a gradient penalty: a gradient of a gradient, by hand."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.critic.parameters(), lr=0.05)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        self.losses.append(loss.item())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.feature("manual_optimization")
def test_gradient_penalty(conformance: Conformance) -> None:
    conformance.same_training(GradientPenalty)


class SparseEmbedding(Base):
    def build(self) -> None:
        self.token = nn.Embedding(19, 8, sparse=True)
        self.head = nn.Linear(8, 19)

    def dataset(self) -> Dataset[Any]:
        return token_data(self.samples, 19, 6)

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.head(self.token(batch[0])).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.feature("sparse_gradients")
def test_sparse_gradients(conformance: Conformance) -> None:
    conformance.same_training(SparseEmbedding)


class OddParameters(Mlp):
    """Parameters of several types, a scalar, an empty one, and one laid out in another order."""

    def build(self) -> None:
        super().build()
        self.wide = nn.Linear(8, 4).double()
        self.narrow = nn.Linear(4, 1).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 8).t())

    def loss(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        hidden = self.wide(x.double()).bfloat16()
        out = self(x) * self.scale + self.narrow(hidden).float() + (x @ self.transposed).mean(1, keepdim=True)
        return F.mse_loss(out, y) + self.empty.sum()


@pytest.mark.feature("training")
def test_parameters_of_several_types_and_layouts(conformance: Conformance) -> None:
    conformance.same_training(OddParameters, {"momentum": 0.0}, tolerance=2e-2, floor=0.1)


class ChannelsLast(ConvBatchNorm):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
        )
        self.net.to(memory_format=torch.channels_last)

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self.net(batch[0].view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)), batch[1])


@pytest.mark.feature("training")
def test_channels_last(conformance: Conformance) -> None:
    conformance.same_training(ChannelsLast)


class SkipsBatches(Mlp):
    """Makes the second batch of the run None, which Lightning skips; the last one stays as short as it is."""

    taken = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.taken += 1
        return None if self.taken == 2 else batch


@pytest.mark.feature("training")
def test_batches_that_are_skipped(conformance: Conformance) -> None:
    conformance.same_training(SkipsBatches, {"samples": 29}, {"max_epochs": 2}, losses=False)


class EndsEpochs(Mlp):
    """Leaves each epoch after three batches, by the hook that Lightning has for it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


@pytest.mark.feature("limits")
def test_hook_that_ends_the_epoch(conformance: Conformance) -> None:
    conformance.same_training(EndsEpochs, {"samples": 45}, {"max_epochs": 2})


class PeeksAtData(Mlp):
    """Looks at its training data while it trains, as for data-dependent scales or sample images."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 3):
            x, _ = next(iter(self.trainer.train_dataloader))
            self.notes = float(x.mean())


@pytest.mark.feature("sample_order")
@pytest.mark.parametrize("samples", [32, 29])
def test_module_that_looks_at_its_loader(conformance: Conformance, samples: int) -> None:
    conformance.same_training(PeeksAtData, {"samples": samples}, {"max_epochs": 2}, losses=samples == 32)


class Unbatched(Mlp):
    """The data set makes batches itself, of which each rank takes its share."""

    def train_dataloader(self) -> Any:
        x, y = regression_data(32).tensors
        batches = list(TensorDataset(x.unflatten(0, (-1, 4)), y.unflatten(0, (-1, 4))))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.feature("sample_order")
def test_loader_without_automatic_batching(conformance: Conformance) -> None:
    """R ranks take R consecutive batches of 4 per step: in one process, as many accumulated batches."""
    got = conformance.ranks(fit, Unbatched)
    want = conformance.plain(fit, Unbatched, None, {"accumulate_grad_batches": conformance.world_size})
    assert got[0].steps == want.steps
    assert_same_weights(got[0].weights, want.weights)


class OwnTransfer(Mlp):
    """Batch hooks of the module: normalised before and after the transfer to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - 0.1, batch[1]]


@pytest.mark.feature("training")
def test_batch_transfer_hooks(conformance: Conformance) -> None:
    conformance.same_training(OwnTransfer, {"samples": 29}, losses=False)
