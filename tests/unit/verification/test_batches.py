"""Batches of several ranks become the batch of one process, or verify says which part cannot."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification.batches import join_batches, sample_count


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass(frozen=True)
class Example:
    x: Tensor
    scale: float


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def test_tensors_are_joined_along_the_first_axis() -> None:
    assert torch.equal(join_batches([column(1, 2), column(3), column(4, 5)]), column(1, 2, 3, 4, 5))


def test_one_batch_stays_what_it_is() -> None:
    batch = object()
    assert join_batches([batch]) is batch


def test_nested_structures_keep_their_types() -> None:
    def batch(start: float) -> Any:
        return {
            "pair": Pair(column(start, start + 1), [f"{start}", f"{start + 1}"]),
            "example": Example(column(start, start + 1), 0.5),
            "list": [column(start), (column(-start),)],
            "array": np.array([start]),
            "whole": torch.tensor(7),
            "nothing": None,
        }

    joined = join_batches([batch(1.0), batch(3.0)])
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].names == ["1.0", "2.0", "3.0", "4.0"]
    assert torch.equal(joined["pair"].x, column(1, 2, 3, 4))
    assert torch.equal(joined["example"].x, column(1, 2, 3, 4))
    assert joined["example"].scale == 0.5
    assert torch.equal(joined["list"][0], column(1, 3))
    assert torch.equal(joined["list"][1][0], column(-1, -3))
    assert joined["array"].tolist() == [1.0, 3.0]
    assert joined["whole"] == 7
    assert joined["nothing"] is None


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(list, d)])
def test_mappings_keep_their_type(kind: Any) -> None:
    first, second = kind({"x": column(1)}), kind({"x": column(2)})
    joined = join_batches([first, second])
    assert type(joined) is type(first)
    assert torch.equal(joined["x"], column(1, 2))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"a": [SimpleNamespace()]}, {"a": [SimpleNamespace()]}, ["batch['a'][0]", "SimpleNamespace"]),
        ({"ids": torch.zeros(2, 3)}, {"ids": torch.zeros(2, 5)}, ["batch['ids']", "(2, 3), (2, 5)", "pad"]),
        ({"a": column(1)}, {"b": column(1)}, ["batch has the keys a, b"]),
        ((column(1), 3), (column(1), 4), ["batch[1]", "3, 4"]),
        ((column(1), torch.tensor(3)), (column(1), torch.tensor(4)), ["batch[1]"]),
        ([column(1)], [column(1), column(2)], ["lengths 1, 2"]),
        ({"a": column(1)}, {"a": [1]}, ["batch['a']", "different types"]),
    ],
)
def test_what_cannot_be_joined_is_named_with_its_place(first: Any, second: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        join_batches([first, second])
    assert all(word in str(error.value) for word in [*words, "llmscale_join_batches"])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (column(1, 2, 3), 3),
        ({"whole": torch.tensor(1), "names": ["a", "b"], "x": column(1, 2)}, 2),
        (Pair(column(1, 2, 3), ["a"] * 3), 3),
        (Example(column(1), 0.5), 1),
        ([np.zeros((4, 2)), None], 4),
        (5, 1),
    ],
)
def test_sample_count(batch: Any, samples: int) -> None:
    assert sample_count(batch) == samples
