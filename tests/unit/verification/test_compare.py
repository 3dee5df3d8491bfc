"""What the comparison of two recordings finds, and in which order."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification import Settings, compare
from lightning_llmscale.verification.recording import State
from tests.unit.verification.recordings import BUFFER, GRADIENT, W, compare_two_ranks, state, write_rank

BOTH = {"w": GRADIENT, "v": GRADIENT}


def times(factor: float) -> dict[str, torch.Tensor]:
    return {"w": GRADIENT * factor, "v": GRADIENT * factor}


def test_equal_recordings_pass(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path)
    assert report.passed
    assert report.first is None
    assert report.hints == []
    assert {quantity: largest.difference for quantity, largest in report.largest.items()} == dict.fromkeys(
        ["start", "loss", "gradients", "weights", "buffers", "between ranks"], 0.0
    )
    assert "Equal within 1e-05: 2 steps under HandWritten on 2 processes" in report.table()


def test_rounding_passes_and_is_reported(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, end=state(W * (1 + 1e-6)))
    assert report.passed
    assert 0 < report.largest["weights"].difference < 1e-5
    assert report.largest["weights"].name == "w"
    assert report.largest["weights"].rank == 1


def test_the_tolerance_can_be_set(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, Settings(tolerance=1e-8), end=state(W * (1 + 1e-6)))
    assert not report.passed


def test_the_first_wrong_gradient_is_named_with_step_rank_and_values(tmp_path: Path) -> None:
    other = GRADIENT.clone()
    other[2] = -1.5
    report = compare_two_ranks(tmp_path, gradients=[BOTH, {"w": other, "v": other}], end=state(W * 2))
    first = report.first
    assert first is not None
    assert (first.quantity, first.name, first.step, first.ranks) == ("gradients", "w", 1, [1])
    assert first.difference == pytest.approx(0.5)
    assert "the gradient of w in step 2 has an element -1.5 instead of -1 on rank 1" in report.verdict
    assert [finding.quantity for finding in report.findings] == ["gradients", "weights"]


def test_a_wrong_start_comes_before_all_else(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, start=state(b=BUFFER + 1), gradients=[times(2)] * 2, losses=[9.0, 9.0])
    assert report.first is not None
    assert (report.first.quantity, report.first.name, report.first.ranks) == ("start", "b", [1])
    assert "Rank 1 did not get the values of rank 0" in report.hints[0]


def test_untied_weights(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, start=state(v=W.clone()), end=state(v=W.clone()))
    assert report.first is not None
    assert report.first.quantity == "tying"
    assert "w and v are one tensor in the plain run and are not under the strategy on rank 1" in report.verdict
    assert "broken" in report.table()


def test_a_wrong_buffer(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, end=state(b=BUFFER * 2))
    assert "the buffer b after the last step has an element 6 instead of 3 on rank 1" in report.verdict


def test_a_missing_gradient_is_a_zero_one(tmp_path: Path) -> None:
    none = {"w": torch.zeros(3)}
    write_rank(tmp_path / "plain", gradients=[none, none])
    write_rank(tmp_path / "strategy", gradients=[{}, {"v": torch.zeros(3)}])
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings()).passed
    write_rank(tmp_path / "strategy", gradients=[{}, {"v": torch.ones(3)}])
    report = compare(tmp_path / "strategy", tmp_path / "plain", Settings())
    assert report.first is not None
    assert report.first.name == "v"


def test_the_loss_is_the_mean_over_replicas(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain", losses=[2.0, 1.0])
    write_rank(tmp_path / "strategy", 0, 2, losses=[1.0, 0.5])
    write_rank(tmp_path / "strategy", 1, 2, losses=[3.0, 1.5])
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings()).passed


def test_declared_weights_weigh_the_loss(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain", losses=[2.5, 1.0])
    write_rank(tmp_path / "strategy", 0, 2, losses=[1.0, 1.0], weights=[1.0, 0.0])
    write_rank(tmp_path / "strategy", 1, 2, losses=[3.0, 1.0], weights=[3.0, 0.0])
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings()).passed


def test_a_wrong_loss(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, losses=[2.0, 3.0])
    assert report.first is not None
    assert (report.first.quantity, report.first.step) == ("loss", 1)
    assert "the loss of step 2 is 2 instead of 1: a relative difference of 1.0e+00" in report.verdict


def test_ranks_may_hold_different_parameters(tmp_path: Path) -> None:
    a, b = torch.ones(2), torch.ones(3)
    whole = State({"a": a, "b": b}, {}, [])
    write_rank(tmp_path / "plain", start=whole, end=whole, gradients=[{"a": a, "b": b}])
    for rank, (name, tensor) in enumerate({"a": a, "b": b}.items()):
        part = State({name: tensor}, {}, [])
        losses = [None, None] if rank == 0 else [2.0, 1.0]
        facts = {"replica": 0, "replicas": 1}
        write_rank(
            tmp_path / "strategy", rank, 2, start=part, end=part, gradients=[{name: tensor}], losses=losses, info=facts
        )
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings()).passed
    whole = State({"a": a, "b": b, "c": a}, {}, [])
    write_rank(tmp_path / "plain", start=whole, end=whole, gradients=[{"a": a, "b": b}])
    assert "no rank holds c" in compare(tmp_path / "strategy", tmp_path / "plain", Settings()).verdict


def test_other_shapes(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, end=state(torch.ones(1)))
    assert "has the shape (1,) instead of (3,)" in report.verdict


def test_other_numbers_of_steps(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, gradients=[BOTH])
    assert "rank 1 made 1 optimizer steps, the plain run 2" in report.verdict


def test_summed_gradients_are_recognised(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain")
    for rank in range(2):
        write_rank(tmp_path / "strategy", rank, 2, gradients=[times(2), times(2.1)])
    hints = compare(tmp_path / "strategy", tmp_path / "plain", Settings()).hints
    assert len(hints) == 1
    assert "2 times that of the plain run, as if the 2 ranks' gradients were summed" in hints[0]


def test_twice_averaged_gradients_are_recognised(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain")
    for rank in range(2):
        write_rank(tmp_path / "strategy", rank, 2, gradients=[times(0.5), times(0.5)])
    assert "divided by their number again" in compare(tmp_path / "strategy", tmp_path / "plain", Settings()).hints[0]


def test_gradients_that_were_never_exchanged_are_recognised(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain")
    apart = torch.tensor([1.0, -1.0, 0.5])
    for rank, sign in enumerate([1, -1]):
        own = {"w": GRADIENT + sign * apart, "v": GRADIENT + sign * apart}
        write_rank(tmp_path / "strategy", rank, 2, gradients=[own, own])
    report = compare(tmp_path / "strategy", tmp_path / "plain", Settings())
    assert report.hints == ["The mean of the ranks' gradients is right, but no rank has it: they were never exchanged."]
    assert report.first is not None
    assert report.first.ranks == [0, 1]


def test_a_rank_that_skips_synchronisation_is_named(tmp_path: Path) -> None:
    own = {"w": GRADIENT.flip(0), "v": GRADIENT.flip(0)}
    hints = compare_two_ranks(tmp_path, gradients=[own, own]).hints
    assert len(hints) == 1
    assert hints[0].startswith("Rank 0 agrees with the plain run and rank 1 does not")


def test_a_small_difference_of_later_steps_may_be_rounding(tmp_path: Path) -> None:
    hints = compare_two_ranks(tmp_path, gradients=[BOTH, times(1 + 5e-5)]).hints
    assert len(hints) == 1
    assert "--trainer.precision=64-true" in hints[0]
    assert compare_two_ranks(tmp_path, gradients=[times(1 + 5e-5), BOTH]).hints == []


def test_batch_norm_in_training_mode_is_pointed_out_only_if_something_differs(tmp_path: Path) -> None:
    norms = {"batch_norms": ["net.1", "net.4"]}
    write_rank(tmp_path / "plain", info=norms)
    write_rank(tmp_path / "strategy", info=norms)
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings()).hints == []
    write_rank(tmp_path / "strategy", losses=[5.0, 5.0], info=norms)
    assert (
        "net.1 (and 1 more) is a BatchNorm" in compare(tmp_path / "strategy", tmp_path / "plain", Settings()).hints[0]
    )


def test_weights_that_only_rounding_moves_are_left_out_for_the_users_optimizer(tmp_path: Path) -> None:
    noisy = {"w": torch.tensor([1.0, 1.0, 1e-9]), "v": torch.tensor([1.0, 1.0, 1e-9])}
    moved = state(torch.tensor([1.0, -2.0, 4.1]))
    write_rank(tmp_path / "plain", gradients=[noisy, noisy])
    write_rank(tmp_path / "strategy", gradients=[noisy, noisy], end=moved)
    assert compare(tmp_path / "strategy", tmp_path / "plain", Settings(optimizer="user")).passed
    assert not compare(tmp_path / "strategy", tmp_path / "plain", Settings()).passed


def test_the_report_is_json_even_with_infinities(tmp_path: Path) -> None:
    report = compare_two_ranks(tmp_path, end=state(torch.tensor([1.0, -2.0, math.inf])))
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["passed"] is False
    assert content["findings"][0]["difference"] == "inf"
    assert content["largest"]["weights"]["name"] == "w"
    assert content["verdict"] == report.verdict


def test_a_rank_that_did_not_finish_is_named(tmp_path: Path) -> None:
    write_rank(tmp_path / "plain")
    write_rank(tmp_path / "strategy", 0, 2)
    with pytest.raises(ConfigurationError, match="rank 1 of 2 left no complete recording"):
        compare(tmp_path / "strategy", tmp_path / "plain", Settings())
