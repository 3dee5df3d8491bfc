"""The distance of two tensors, as verify measures it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_llmscale.verification.difference import difference, floor_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "reference", "expected", "index"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0),
        ([1.0, 2.5, 4.0], [1.0, 2.0, 4.0], 0.125, 1),
        ([0.0, -4.0], [0.0, 4.0], 2.0, 1),
        ([1.0], [0.0], INF, 0),
        ([NAN, 1.0], [NAN, 1.0], 0.0, 0),
        ([INF, 1.0], [INF, 1.0], 0.0, 0),
        ([1.0, NAN], [1.0, 2.0], INF, 1),
        ([1.0, 2.0], [1.0, INF], INF, 1),
        ([INF], [-INF], INF, 0),
        ([INF, 3.0], [INF, 2.0], 0.5, 1),
        ([], [], 0.0, 0),
    ],
)
def test_difference(ours: list[float], reference: list[float], expected: float, index: int) -> None:
    found = difference(torch.tensor(ours), torch.tensor(reference))
    assert found[0] == pytest.approx(expected)
    assert found[1] == index


def test_other_shapes_are_infinitely_far() -> None:
    assert difference(torch.zeros(2), torch.zeros(2, 1))[0] == math.inf


def test_floor_is_what_small_values_are_relative_to() -> None:
    assert difference(torch.tensor([2e-9]), torch.tensor([1e-9]), floor=1.0)[0] == pytest.approx(1e-9)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_every_type_is_compared(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3, dtype=dtype), torch.tensor([1, 0, 1]).to(dtype)
    assert difference(ones, ones)[0] == 0
    assert difference(ones, zeros)[0] == 1


def test_sparse_gradients_are_compared() -> None:
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (3,))
    assert difference(sparse, torch.tensor([0.0, 1.0, 0.0]))[0] == 1


def test_floor_ignores_infinities_and_empty_tensors() -> None:
    assert floor_of([torch.tensor([INF, 2.0, -10.0]), torch.tensor([NAN]), torch.tensor([])]) == pytest.approx(1.0)
    assert floor_of([]) == 0.0


def test_types_may_differ() -> None:
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0], dtype=torch.float64))[0] == 0.5
