"""Nothing hangs: a rank that fails, leaves or falls silent is named on every other rank within seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_llmscale.errors import LlmscaleError, PeerFailureError
from tests.conformance.harness import Conformance
from tests.conformance.jobs import StrategySpec, new_trainer, rank
from tests.conformance.models import Mlp, regression_data
from tests.support.pool import Outcome, RanksFailed

pytestmark = pytest.mark.feature("failures")

#: From the end of the failing rank to the end of the last other one; generous, because test machines are slow.
SECONDS = 20.0


class Broken(RuntimeError):
    """What the user's code raises."""


def break_down(how: str) -> None:
    if how == "raise":
        raise Broken("the sensor is on fire")
    if how == "exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


class BreaksAt(Mlp):
    """Rank 1 breaks down at one place in its life, the others do not."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__()
        self.place, self.how = place, how

    def reach(self, place: str) -> None:
        if place == self.place and rank() == 1:
            break_down(self.how)

    def setup(self, stage: str) -> None:
        self.reach("setup")

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        self.reach("train_dataloader")
        return super().train_dataloader()

    def on_train_start(self) -> None:
        self.reach("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.reach("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.reach("on_after_backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.reach("optimizer_step")

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(16), batch_size=2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validation_step")
        self.log("val", self.loss(batch, batch_idx), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.reach("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("on_save_checkpoint")


def fit_and_save(strategy: StrategySpec, place: str, how: str) -> None:
    trainer = new_trainer(strategy, max_epochs=2)
    trainer.fit(BreaksAt(place, how))
    trainer.save_checkpoint("end.ckpt")


def assert_no_hang(outcomes: list[Outcome]) -> None:
    if any(outcome.timed_out for outcome in outcomes):
        raise RanksFailed("hang", outcomes)


def assert_rank_1_is_named(outcomes: list[Outcome], *words: str) -> None:
    broken = outcomes[1]
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        problem = None
        if outcome.error is None:
            problem = "no error"
        elif not outcome.error.is_a(PeerFailureError):
            problem = "not a PeerFailureError"
        elif "rank 1" not in outcome.error.message or not all(word in outcome.error.message for word in words):
            problem = f"rank 1 or {words} not in the message"
        elif outcome.seconds > broken.seconds + SECONDS:
            problem = "too late"
        if problem:
            raise RanksFailed(f"rank {outcome.rank}: {problem}", outcomes)


PLACES = [
    "setup",
    "configure_optimizers",
    "train_dataloader",
    "on_train_start",
    "training_step",
    "on_after_backward",
    "optimizer_step",
    "validation_step",
    "on_train_epoch_end",
    "on_save_checkpoint",
]


@pytest.mark.parametrize("place", PLACES)
def test_rank_that_raises(conformance: Conformance, place: str) -> None:
    outcomes = conformance.pool.outcomes(fit_and_save, conformance.strategy, place, "raise", timeout=60.0)
    assert outcomes[1].error is not None
    assert outcomes[1].error.is_a(Broken), f"rank 1 must raise the user's own error, not {outcomes[1].error}"
    # an error outside fit passes by the trainer, which then tells the strategy nothing of its cause
    words = ("Broken", "the sensor is on fire") if place != "on_save_checkpoint" else ()
    assert_rank_1_is_named(outcomes, *words)


SUDDEN = [
    ("training_step", "exit"),
    ("training_step", "os._exit"),
    ("training_step", "kill"),
    ("optimizer_step", "kill"),
    ("validation_step", "kill"),
]
SUDDEN_LONG = [(place, how) for place in PLACES for how in ("exit", "os._exit", "kill") if (place, how) not in SUDDEN]


@pytest.mark.parametrize(
    ("place", "how"), [*SUDDEN, *(pytest.param(*case, marks=pytest.mark.long) for case in SUDDEN_LONG)]
)
def test_rank_that_dies(conformance: Conformance, place: str, how: str) -> None:
    outcomes = conformance.pool.outcomes(fit_and_save, conformance.strategy, place, how, timeout=60.0)
    assert outcomes[1].exit_code == {"exit": 3, "os._exit": 3, "kill": -signal.SIGKILL}[how]
    assert_rank_1_is_named(outcomes)


def stop_rank_1(strategy: StrategySpec) -> None:
    """Rank 1 is stopped like a process on a frozen machine, and continued when rank 0 has failed."""
    trainer = new_trainer(strategy)
    try:
        trainer.fit(Freezes())
    finally:
        if rank() == 0:
            os.kill(int(Path("pid").read_text()), signal.SIGCONT)


class Freezes(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and rank() == 1:
            Path("unfinished").write_text(str(os.getpid()))
            Path("unfinished").rename("pid")
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def test_rank_that_falls_silent(conformance: Conformance) -> None:
    impatient = conformance.with_options(peer_timeout=3.0)
    outcomes = conformance.pool.outcomes(stop_rank_1, impatient.strategy, timeout=60.0)
    assert_no_hang(outcomes)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.error is not None, str(outcome)
            assert outcome.error.is_a(PeerFailureError), str(outcome)
            assert "rank 1" in outcome.error.message


class EarlyExit(Mlp):
    """Rank 1 leaves the training loop by itself, as with a user's own stopping rule."""

    def on_train_batch_end(self, *args: Any) -> None:
        if rank() == 1 and self.global_step == 2:
            self.trainer.should_stop = True
            self.trainer.limit_val_batches = 0


def fit_early_exit(strategy: StrategySpec) -> int:
    trainer = new_trainer(strategy, max_epochs=3)
    trainer.fit(EarlyExit())
    return trainer.global_step


def test_rank_that_stops_alone(conformance: Conformance) -> None:
    """Either all stop at the same step, or there is an error in words; never a hang."""
    outcomes = conformance.pool.outcomes(fit_early_exit, conformance.strategy, timeout=60.0)
    assert_no_hang(outcomes)
    if any(outcome.error is not None for outcome in outcomes):
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if not all(error.is_a(LlmscaleError) for error in errors) or not any("rank 1" in e.message for e in errors):
            raise RanksFailed("an error that does not explain itself", outcomes)
    else:
        assert len({outcome.value for outcome in outcomes}) == 1


class SometimesBroken(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x, y = regression_data(24).tensors
        for index, sample in enumerate(zip(x, y, strict=True)):
            if index == 9 and rank() == 1:
                raise Broken("shard 7 is truncated")
            yield sample


class BrokenData(Mlp):
    workers = 0

    def train_dataloader(self) -> Any:
        return DataLoader(SometimesBroken(), batch_size=4, num_workers=self.workers)


class BrokenDataInWorkers(BrokenData):
    workers = 1


def fit_broken_data(strategy: StrategySpec, kind: type[Mlp]) -> None:
    new_trainer(strategy, max_epochs=2).fit(kind())


@pytest.mark.parametrize("kind", [BrokenData, pytest.param(BrokenDataInWorkers, marks=pytest.mark.long)])
def test_rank_whose_data_breaks(conformance: Conformance, kind: type[Mlp]) -> None:
    outcomes = conformance.pool.outcomes(fit_broken_data, conformance.strategy, kind, timeout=60.0)
    assert outcomes[1].error is not None
    assert outcomes[1].error.is_a(Broken), str(outcomes[1])
    assert_rank_1_is_named(outcomes, "Broken")


def evaluate_broken(strategy: StrategySpec, function: str) -> None:
    trainer = new_trainer(strategy)
    module = BreaksAt("validation_step", "raise")
    getattr(trainer, function)(module, DataLoader(regression_data(16), batch_size=2))


def test_rank_that_raises_in_validation_without_fit(conformance: Conformance) -> None:
    outcomes = conformance.pool.outcomes(evaluate_broken, conformance.strategy, "validate", timeout=60.0)
    assert_rank_1_is_named(outcomes, "the sensor is on fire")


class DifferentCalls(Mlp):
    """Ranks take different ways through the program."""

    def on_train_epoch_end(self) -> None:
        if rank() == 0:
            self.trainer.strategy.barrier("only rank 0 comes here")
        else:
            self.trainer.strategy.reduce(self.net[0].weight.sum())


def fit_different_calls(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(DifferentCalls())


def test_ranks_in_different_collectives(conformance: Conformance) -> None:
    for error in conformance.pool.errors(fit_different_calls, conformance.strategy, timeout=60.0):
        assert error.is_a(PeerFailureError), error.traceback
        assert "only rank 0 comes here" in error.message


class SavesAlone(Mlp):
    """One rank saves a checkpoint in mid-epoch while the other goes on into DDP's broadcast of buffers."""

    alone = 0

    def build(self) -> None:
        super().build()
        self.register_buffer("offset", torch.zeros(1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and rank() == self.alone:
            self.trainer.save_checkpoint("alone.ckpt")


def fit_saving_alone(strategy: StrategySpec, alone: int) -> None:
    module = SavesAlone()
    module.alone = alone
    new_trainer(strategy).fit(module)


@pytest.mark.parametrize("alone", [0, 1])
def test_rank_that_saves_alone_between_two_steps(conformance: Conformance, alone: int) -> None:
    for error in conformance.pool.errors(fit_saving_alone, conformance.strategy, alone, timeout=60.0):
        assert error.is_a(PeerFailureError), error.traceback
        assert "Trainer.save_checkpoint" in error.message


class OtherLayer(Mlp):
    """Ranks build layers of different sizes."""

    def build(self) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8 + rank()), torch.nn.Linear(8 + rank(), 1))


def fit_other_layer(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(OtherLayer())


def test_ranks_with_different_modules(conformance: Conformance) -> None:
    for error in conformance.pool.errors(fit_other_layer, conformance.strategy, timeout=60.0):
        assert "appears not to match sizes of the same param" in error.message


class LongBackward(torch.autograd.Function):
    """Rank 1's backward takes longer than a deadlock needs to be called one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if rank() == 1:
            time.sleep(7.0)
        return grad


class WaitsInAWindow(Mlp):
    """Within an accumulation window rank 0 waits on the control plane for a rank that still computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return LongBackward.apply(loss) if batch_idx == 0 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.strategy.barrier("all ranks come here")


def fit_with_long_backward(strategy: StrategySpec) -> int:
    trainer = new_trainer(strategy, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(WaitsInAWindow())
    return trainer.global_step


def test_a_long_backward_within_a_window_is_no_deadlock(conformance: Conformance) -> None:
    assert min(conformance.ranks(fit_with_long_backward)) > 0


def fit_again_after_failure(strategy: StrategySpec) -> tuple[str, int]:
    """A sweep goes on after a trial that failed on all ranks alike."""
    trainer = new_trainer(strategy)
    try:
        trainer.fit(AllBreak())
    except Broken as error:
        first = str(error)
    trainer = new_trainer(strategy)
    trainer.fit(Mlp())
    return first, trainer.global_step


class AllBreak(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise Broken("diverged")
        return super().training_step(batch, batch_idx)


def test_new_trainer_after_a_failed_run(conformance: Conformance) -> None:
    assert conformance.ranks(fit_again_after_failure) == [("diverged", 6)] * conformance.world_size
