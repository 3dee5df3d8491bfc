"""Faults injected into real ranks, and the deadline that a callback adds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_llmscale.callbacks import Chaos, HangWatchdog
from lightning_llmscale.errors import DataError, PeerFailureError
from tests.conformance.jobs import StrategySpec, new_trainer, rank
from tests.conformance.models import Mlp
from tests.support.pool import RankPool

RING = StrategySpec("lightning_llmscale.RingAllReduceStrategy", {"peer_timeout": 3.0})


def fit_under_chaos(strategy: StrategySpec, action: Any, phase: Any) -> None:
    new_trainer(strategy, callbacks=[Chaos(action, rank=1, step=2, phase=phase)]).fit(Mlp())


@pytest.mark.parametrize("phase", ["batch_start", "backward", "gradients", "optimizer_step", "batch_end"])
def test_a_killed_rank_is_named_by_the_other(pool2: RankPool, phase: str) -> None:
    survivor, _ = pool2.outcomes(fit_under_chaos, RING, "kill", phase, timeout=60.0)
    assert survivor.error is not None, str(survivor)
    assert survivor.error.is_a(PeerFailureError), str(survivor)
    assert "rank 1" in survivor.error.message


class UnfreezesAlone(Mlp):
    """Rank 1 waits inside torch, to wrap its module anew, while rank 0 waits for gradients."""

    def build(self) -> None:
        super().build()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and rank() == 1:
            self.net[0].requires_grad_(True)


def fit_unfreezing_alone(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(UnfreezesAlone())


def test_a_data_plane_that_loses_patience_tells_all_ranks(pool2: RankPool) -> None:
    for error in pool2.errors(fit_unfreezing_alone, RING, timeout=60.0):
        assert error.is_a(PeerFailureError), error.traceback
        assert "rank" in error.message.lower()


class StuckOnOneRank(Mlp):
    """Rank 1's main thread waits for a lock that nobody will release."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and rank() == 1:
            threading.Event().wait(50.0)
        return super().training_step(batch, batch_idx)


def fit_watched(strategy: StrategySpec) -> None:
    watchdog = HangWatchdog(step_timeout=3.0, first_step_timeout=30.0)
    new_trainer(strategy, callbacks=[watchdog]).fit(StuckOnOneRank())


def test_a_stuck_step_ends_the_run_on_all_ranks(pool2: RankPool) -> None:
    waiting, stuck = pool2.outcomes(fit_watched, RING, timeout=60.0)
    assert not waiting.timed_out, str(waiting)
    assert not stuck.timed_out, str(stuck)
    assert waiting.error is not None, str(waiting)
    assert "has spent more than 3 s in the step after batch 1" in waiting.error.message
    assert "rank 1 is in training_step of batch 2" in waiting.error.message
    assert "in training_step of batch 2" in stuck.log, "the stuck rank says so before it ends"
    assert "StuckOnOneRank" in stuck.log or "training_step" in stuck.log


class BackwardPastTheStrategy(Mlp):
    """Optimises by hand and calls ``loss.backward()``, which Lightning cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, batch_idx).backward()


def fit_past_the_strategy(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(BackwardPastTheStrategy())


def test_a_backward_past_the_strategy_is_refused(pool2: RankPool) -> None:
    errors = pool2.errors(fit_past_the_strategy, RING, timeout=60.0)
    assert any("self.manual_backward(loss)" in error.message for error in errors)


class ComputesOnRankZero(Mlp):
    """Rank 0 alone enters a collective that torch runs, not Lightning."""

    def on_train_batch_end(self, *args: Any) -> None:
        if rank() == 0:
            torch.distributed.all_reduce(torch.ones(1))


def fit_with_a_collective_on_rank_zero(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(ComputesOnRankZero())


def test_a_collective_of_torch_on_one_rank_ends_in_words(pool2: RankPool) -> None:
    outcomes = pool2.outcomes(fit_with_a_collective_on_rank_zero, RING, timeout=60.0)
    for outcome in outcomes:
        assert not outcome.timed_out, str(outcome)
        assert not outcome.ok, str(outcome)


class UnequalData(Mlp):
    def dataset(self) -> Any:
        return torch.utils.data.Subset(super().dataset(), range(8 + 8 * rank()))


def fit_unequal_data(strategy: StrategySpec) -> None:
    new_trainer(strategy).fit(UnequalData())


def test_data_sets_of_different_length_are_refused_at_set_up(pool2: RankPool) -> None:
    for error in pool2.errors(fit_unequal_data, RING, timeout=60.0):
        assert error.is_a(DataError)
        assert "the ranks' loaders draw from [8, 16] samples" in error.message
