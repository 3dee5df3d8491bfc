"""Optimizers stepped by hand: the weights of one process running the same training_step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.harness import Conformance
from tests.conformance.models import Base, Mlp

pytestmark = pytest.mark.feature("manual_optimization")


class Manual(Mlp):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.losses.append(loss.item())
        self.by_hand(loss, batch_idx)

    def by_hand(self, loss: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Accumulates(Manual):
    def by_hand(self, loss: Tensor, index: int) -> None:
        self.manual_backward(loss / 2)
        if index % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class AccumulatesWithoutSync(Manual):
    """Communicates in every third batch only, in the way Lightning documents."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=last):
            loss = self.loss(batch, batch_idx)
            self.losses.append(loss.item())
            self.manual_backward(loss / 3)
        if last:
            optimizer.step()
            optimizer.zero_grad()


class ClipsAndSchedules(Manual):
    def by_hand(self, loss: Tensor, index: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class StepsWithClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("kind", [Manual, Accumulates, AccumulatesWithoutSync, ClipsAndSchedules, StepsWithClosure])
def test_one_optimizer(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind, {"samples": 48})


@pytest.mark.parametrize("kind", [Manual, Accumulates])
def test_last_partial_batch(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind, {"samples": 29}, losses=False)


class Gan(Base):
    """Generator and discriminator in turn; the other one's parameters take part in the graph but not in the step."""

    toggles = True

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        self.update(generator, lambda: F.softplus(-self.discriminator(self.generator(batch[0]))).mean())
        self.update(discriminator, lambda: self.discriminator_loss(batch[0]))

    def discriminator_loss(self, x: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(x).detach())
        return (F.softplus(fake) + F.softplus(-self.discriminator(x))).mean()

    def update(self, optimizer: Any, loss_of: Any) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = loss_of()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)


class UntoggledGan(Gan):
    toggles = False


class AccumulatingGan(Gan):
    """Each optimizer accumulates two batches, without communication for the first of them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        last = batch_idx % 2 == 1
        parts = [
            lambda: F.softplus(-self.discriminator(self.generator(batch[0]))).mean(),
            lambda: self.discriminator_loss(batch[0]),
        ]
        for optimizer, loss_of in zip(self.optimizers(), parts, strict=True):
            with optimizer.toggle_model(sync_grad=last):
                loss = loss_of()
                self.losses.append(loss.item())
                self.manual_backward(loss / 2)
            if last:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Gan, UntoggledGan, AccumulatingGan])
def test_two_optimizers(conformance: Conformance, kind: type[Base]) -> None:
    conformance.same_training(kind, {"samples": 64})


class StepsSometimes(Manual):
    """Makes no step at all in some batches: forward without backward."""

    def by_hand(self, loss: Tensor, index: int) -> None:
        if index % 3 != 1:
            super().by_hand(loss, index)


def test_batches_without_backward(conformance: Conformance) -> None:
    conformance.same_training(StepsSometimes, {"samples": 64})
