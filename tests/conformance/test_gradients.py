"""Gradients as one process has them: accumulated, clipped, weighted, and seen so by the user's hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.conformance.harness import Conformance, assert_close, assert_same_weights
from tests.conformance.jobs import fit
from tests.conformance.models import Gpt, Mlp, OwnStep, regression_data


@pytest.mark.feature("accumulation")
@pytest.mark.parametrize("kind", [Mlp, OwnStep, pytest.param(Gpt, marks=pytest.mark.long)])
def test_accumulation_with_an_incomplete_last_window(conformance: Conformance, kind: type[Mlp]) -> None:
    conformance.same_training(kind, {"samples": 56}, {"accumulate_grad_batches": 3, "max_epochs": 2})


@pytest.mark.feature("accumulation")
def test_accumulation_over_a_last_partial_batch(conformance: Conformance) -> None:
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    conformance.same_training(Mlp, {"samples": 29}, options, losses=False)


@pytest.mark.feature("accumulation")
def test_accumulation_that_changes_by_epoch(conformance: Conformance) -> None:
    options = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
    results = conformance.same_training(Mlp, {"samples": 32}, options)
    assert results[0].steps == 6


@pytest.mark.feature("clip_norm")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_by_norm(conformance: Conformance, accumulate: int) -> None:
    # a clip on every step hides the scale of gradients: 0.5 clips some steps and leaves others
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate, "max_epochs": 2}
    conformance.same_training(Mlp, {"lr": 0.3, "momentum": 0.0}, options)


@pytest.mark.feature("clip_value")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_by_value(conformance: Conformance, accumulate: int) -> None:
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "accumulate_grad_batches": accumulate}
    conformance.same_training(Mlp, {"lr": 0.3, "momentum": 0.0}, options)


class OwnClipping(Mlp):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        limit = 0.5 if self.global_step < 2 else 0.25
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


@pytest.mark.feature("clip_norm")
def test_clipping_by_the_users_own_hook(conformance: Conformance) -> None:
    conformance.same_training(OwnClipping, {"lr": 0.3, "momentum": 0.0})


class SeesGradients(Mlp):
    """Notes its gradients in both hooks."""

    def build(self) -> None:
        super().build()
        self.notes: dict[str, list[Tensor]] = {"backward": [], "step": []}

    def flat(self) -> Tensor:
        return torch.cat([p.grad.detach().flatten() for p in self.parameters() if p.grad is not None])

    def on_after_backward(self) -> None:
        self.notes["backward"].append(self.flat())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes["step"].append(self.flat())


@pytest.mark.feature("gradient_hooks")
@pytest.mark.parametrize("samples", [32, 29])
def test_hooks_see_the_gradient_of_the_global_batch(conformance: Conformance, samples: int) -> None:
    got = conformance.same_training(SeesGradients, {"samples": samples}, losses=samples % 8 == 0)
    want = conformance.plain(fit, SeesGradients, {"samples": samples}, None)
    for rank, result in enumerate(got):
        for hook, gradients in want.notes.items():
            for step, (mine, truth) in enumerate(zip(result.notes[hook], gradients, strict=True)):
                assert_close(mine, truth, f"gradient of step {step} in {hook} on rank {rank}")


@pytest.mark.feature("gradient_hooks")
def test_optimizer_hook_sees_the_accumulated_gradient(conformance: Conformance) -> None:
    options = {"accumulate_grad_batches": 2}
    got = conformance.same_training(SeesGradients, None, options)
    want = conformance.plain(fit, SeesGradients, None, options)
    for rank, result in enumerate(got):
        for step, (mine, truth) in enumerate(zip(result.notes["step"], want.notes["step"], strict=True)):
            assert_close(mine, truth, f"gradient of step {step} on rank {rank}")


@pytest.mark.feature("partial_batch")
@pytest.mark.parametrize("samples", [30, 29, 25, 1])
def test_last_partial_global_batch_is_weighted_exactly(conformance: Conformance, samples: int) -> None:
    conformance.same_training(Mlp, {"samples": samples}, {"max_epochs": 3}, losses=False)


@pytest.mark.feature("partial_batch")
@pytest.mark.long
def test_every_size_of_the_last_batch(conformance: Conformance) -> None:
    for samples in range(1, 25):
        conformance.same_training(Mlp, {"samples": samples}, {"max_epochs": 2}, losses=False)


class TokenMean(Mlp):
    """A mean over valid tokens, of which samples and ranks hold different numbers; some ranks have none at all."""

    def __init__(self, number: Any = Tensor.clone, **options: Any) -> None:
        self.number = number
        super().__init__(**options)

    def dataset(self) -> Dataset[Any]:
        x, y = regression_data(self.samples).tensors
        index = torch.arange(self.samples)
        valid = ((index * 7) % 5).float()
        in_batch = index % 8
        batch = index // 8 % 4
        # whichever way samples are dealt to ranks, one of these leaves a rank without tokens
        valid[(batch == 1) & (in_batch % 2 == 1)] = 0
        valid[(batch == 2) & (in_batch >= 4)] = 0
        valid[(batch == 3) & (in_batch < 4)] = 0
        return TensorDataset(x, y, valid[:, None])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, valid = batch
        tokens = valid.sum()
        loss = (valid * (self(x) - y) ** 2).sum() / tokens.clamp(min=1)
        return {"loss": loss, "loss_weight": self.number(tokens)}


@pytest.mark.feature("loss_weight")
@pytest.mark.parametrize("number", [Tensor.clone, float, int])
def test_token_mean(conformance: Conformance, number: Any) -> None:
    conformance.same_training(TokenMean, {"number": number, "samples": 64}, {"max_epochs": 2}, losses=False)


@pytest.mark.feature("loss_weight")
@pytest.mark.parametrize("samples", [64, 48])
def test_token_mean_over_an_accumulation_window(conformance: Conformance, samples: int) -> None:
    """Equals one batch as large as the window, also when the last window is incomplete."""
    options = {"accumulate_grad_batches": 4, "max_epochs": 2}
    got = conformance.ranks(fit, TokenMean, {"samples": samples}, options)
    want = conformance.plain(fit, TokenMean, {"samples": samples, "batch": 32}, {"max_epochs": 2})
    assert got[0].steps == want.steps
    assert_same_weights(got[0].weights, want.weights)


class BadWeight(TokenMean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "loss_weight": -1.0}


@pytest.mark.feature("loss_weight")
def test_negative_weight_is_refused(conformance: Conformance) -> None:
    conformance.refused("loss_weight", fit, BadWeight)


class Rank1Infinite(Mlp):
    """One rank's loss overflows once; the step must be lost on all ranks alike, never on one."""

    def loss(self, batch: Any, index: int) -> Tensor:
        loss = super().loss(batch, index)
        return loss * float("inf") if index == 2 and self.trainer.global_rank == 1 else loss


@pytest.mark.feature("detect_nonfinite")
def test_infinite_gradient_reaches_every_rank(conformance: Conformance) -> None:
    results = conformance.ranks(fit, Rank1Infinite)
    for result in results:
        assert not torch.isfinite(torch.cat([value.flatten() for value in result.local.values()])).all()


@pytest.mark.feature("detect_nonfinite")
def test_detect_anomaly_names_the_cause(conformance: Conformance) -> None:
    conformance.same_training(Mlp, None, {"detect_anomaly": True})
