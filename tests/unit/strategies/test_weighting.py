"""The factor by which a rank's loss counts, against the closed formula."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.strategies.weighting import LossWeighting

ONE = torch.tensor(1.0, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (1, 0), (5, 2, 2, 0)])
def test_sample_counts_give_the_mean_over_all_samples(sizes: tuple[int, ...]) -> None:
    replicas = len(sizes)
    got = 0.0
    for rank in range(replicas):
        weighting = LossWeighting(replicas, rank, lambda value: value)
        weighting.begin(sizes)
        got += float(weighting.scale(ONE * (rank + 1), accumulate=1, boundary=True)) * weighting.reduction_scale
    want = Fraction(sum((rank + 1) * n for rank, n in enumerate(sizes)), sum(sizes))
    assert got == pytest.approx(float(want), rel=1e-12)


def test_equal_counts_leave_the_loss_untouched() -> None:
    weighting = LossWeighting(2, 0, lambda value: value)
    weighting.begin((3, 3))
    assert weighting.scale(ONE, 1, True) is ONE


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("windows", [[3, 3, 1], [2]])
def test_declared_weights_average_over_ranks_and_the_window(accumulate: int, windows: list[int]) -> None:
    """Runs R ranks in lock step; the total of a call is the sum over ranks of what each gives to that call."""
    generator, replicas = random.Random(accumulate), 3
    weights = [[[generator.randint(0, 9) for _ in range(replicas)] for _ in range(n)] for n in windows]
    asked: list[list[float]] = [[] for _ in range(replicas)]

    def run(rank: int, totals: list[float] | None) -> list[float]:
        calls = iter(totals or [])
        weighting = LossWeighting(replicas, rank, lambda v: (asked[rank].append(v), next(calls, 1.0))[1])
        gradients = []
        for window in weights:
            gradient = 0.0
            for index, batch in enumerate(window):
                weighting.begin(None)
                weighting.observe({"loss": ONE, "loss_weight": torch.tensor(batch[rank])}, automatic=True)
                loss = ONE * (rank + 10 * index) / accumulate
                gradient += float(weighting.scale(loss, accumulate, boundary=index == len(window) - 1))
            gradients.append(gradient * weighting.reduction_scale)
        return gradients

    for rank in range(replicas):
        run(rank, None)
    totals = [sum(values) for values in zip(*asked, strict=True)]
    got = [sum(parts) for parts in zip(*(run(rank, totals) for rank in range(replicas)), strict=True)]
    for window, gradient in zip(weights, got, strict=True):
        whole = sum(map(sum, window))
        want = sum((r + 10 * i) * w for i, batch in enumerate(window) for r, w in enumerate(batch)) / whole
        assert gradient == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ConfigurationError, match="finite number >= 0"):
        LossWeighting(1, 0, float).observe({"loss": ONE, "loss_weight": weight}, automatic=True)


def test_a_weight_under_manual_optimization_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="manual optimization"):
        LossWeighting(1, 0, float).observe({"loss": ONE, "loss_weight": 1.0}, automatic=False)


def test_a_weight_for_half_a_window_is_refused() -> None:
    weighting = LossWeighting(1, 0, lambda value: value)
    weighting.begin(None)
    weighting.observe({"loss": ONE, "loss_weight": 2.0}, automatic=True)
    weighting.scale(ONE, 2, boundary=False)
    weighting.begin(None)
    with pytest.raises(ConfigurationError, match="for every batch"):
        weighting.observe(ONE, automatic=True)
