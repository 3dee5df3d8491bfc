"""Verify passes a right strategy and catches faults planted in it, on real processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_llmscale import RingAllReduceStrategy
from lightning_llmscale.strategies.catalog import STRATEGIES
from lightning_llmscale.verification import Report, Settings, compare
from tests.multiprocess import verify_runs as runs
from tests.support.pool import RankPool

Verify = Callable[..., Report]


@pytest.fixture
def verified(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> Verify:
    """Records under a strategy on two ranks, replays in one process, compares."""

    def run(
        strategy: Callable[[], Strategy],
        model: type[LightningModule] = runs.TiedLM,
        options: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
    ) -> Report:
        settings = settings or Settings(steps=4)
        pool2.run(runs.record_job, tmp_path, strategy, model, options or {}, settings)
        pool1.run(runs.replay_job, tmp_path, model, options or {}, settings)
        return compare(tmp_path / "strategy", tmp_path / "plain", settings)

    return run


@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy, *(partial(runs.from_catalogue, entry.class_path) for entry in STRATEGIES.values())],
    ids=["ddp", *STRATEGIES],
)
def test_a_right_strategy_passes(verified: Verify, strategy: Callable[[], Strategy]) -> None:
    report = verified(strategy)
    assert report.passed, report.table()
    assert (report.ranks, report.replicas, report.steps) == (2, 2, 4)
    assert report.largest["between ranks"].difference == 0
    assert report.tied == [["embedding.weight", "head.weight"]]
    assert {"loss", "gradients", "weights", "buffers"} <= set(report.largest)


def test_summed_gradients_are_caught(verified: Verify) -> None:
    report = verified(runs.SummedGradients)
    assert report.first is not None
    assert (report.first.quantity, report.first.step, report.first.ranks) == ("gradients", 0, [0, 1])
    assert report.first.difference == pytest.approx(1.0, rel=1e-3)
    assert "summed where they should be averaged" in report.hints[0]


def test_a_rank_that_skips_synchronisation_is_caught_and_named(verified: Verify) -> None:
    report = verified(runs.SkippingRank)
    assert report.first is not None
    assert (report.first.quantity, report.first.step, report.first.ranks) == ("gradients", 0, [1])
    assert "rank 1" in report.hints[0]
    assert report.largest["between ranks"].difference > report.tolerance


def test_ranks_that_never_exchange_are_caught(verified: Verify) -> None:
    report = verified(runs.NoExchange)
    assert report.first is not None
    assert report.first.ranks == [0, 1]
    assert "never exchanged" in report.hints[0]


def test_an_unshared_buffer_is_caught(verified: Verify) -> None:
    report = verified(runs.UnsharedBuffers)
    assert report.first is not None
    assert (report.first.quantity, report.first.name, report.first.ranks) == ("start", "projection", [1])
    assert any(finding.quantity == "buffers" for finding in report.findings)


def test_an_untied_weight_is_caught(verified: Verify) -> None:
    report = verified(runs.UntiedWeights)
    assert report.first is not None
    assert (report.first.quantity, report.first.ranks) == ("tying", [0, 1])
    assert "embedding.weight and head.weight" in report.verdict
    assert any(finding.quantity == "gradients" for finding in report.findings)


def test_adamw_hides_what_sgd_shows(verified: Verify) -> None:
    report = verified(runs.SummedGradients, settings=Settings(steps=4, optimizer="user"))
    assert report.largest["loss"].difference < 1e-3  # a loss curve alone would have told nothing
    assert report.first is not None
    assert report.first.quantity == "gradients"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (runs.OddData, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (runs.TokenMean, {"accumulate_grad_batches": 3}),
        (runs.DictBatches, {}),
        (runs.WithDropout, {}),
        pytest.param(runs.TokenMean, {}, marks=pytest.mark.long),
        pytest.param(runs.TiedLM, {"precision": "64-true"}, marks=pytest.mark.long),
        pytest.param(runs.TiedLM, {"precision": "bf16-mixed"}, marks=pytest.mark.long),
        pytest.param(runs.TiedLM, {"precision": "bf16-true"}, marks=pytest.mark.long),
        pytest.param(
            runs.TiedLM, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, marks=pytest.mark.long
        ),
    ],
)
def test_what_a_strategy_must_do_right_passes(
    verified: Verify, model: type[LightningModule], options: dict[str, Any]
) -> None:
    report = verified(RingAllReduceStrategy, model, options, Settings(steps=8))
    assert report.passed, report.table()


def test_dropout_that_stays_on_differs(verified: Verify) -> None:
    report = verified(RingAllReduceStrategy, runs.WithDropout, settings=Settings(steps=2, keep_dropout=True))
    assert report.first is not None
    assert (report.first.quantity, report.first.step) == ("loss", 0)


@pytest.mark.parametrize("model", [runs.TokenMean])
def test_the_mean_of_token_means_of_stock_ddp_is_caught(verified: Verify, model: type[LightningModule]) -> None:
    assert not verified(DDPStrategy, model).passed
