"""Dropout is off while verify runs, and as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_llmscale.verification.dropout import no_dropout


class Recurrent(nn.Module):
    """The output of a stack with dropout between its layers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.stack = kind(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)[0]


@pytest.mark.parametrize(
    "random",
    [
        nn.Dropout(0.5),
        nn.Dropout(0.5, inplace=True),
        nn.Dropout1d(0.5),
        nn.AlphaDropout(0.5),
        lambda x: nn.functional.dropout(x, 0.5, True),
        lambda x: nn.functional.dropout(x),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, None, 0.5),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        torch.compile(nn.Dropout(0.5), backend="eager"),
        Recurrent(nn.LSTM),
        Recurrent(nn.GRU),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    ],
)
def test_no_dropout(random: Any) -> None:
    x = torch.randn(2, 5, 8)
    with no_dropout(random if isinstance(random, nn.Module) else nn.Identity()):
        assert torch.equal(random(x.clone()), random(x.clone()))
    assert not torch.equal(random(x.clone()), random(x.clone()))


def test_no_dropout_leaves_gradients_alone() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with no_dropout(nn.Identity()):
        nn.functional.dropout(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))


def test_no_dropout_when_activations_are_computed_again() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.randn(8, 4)

    def gradient() -> Tensor:
        layer.zero_grad()
        checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).square().sum().backward()
        return layer[0].weight.grad.clone()

    with no_dropout(layer):
        assert torch.equal(gradient(), gradient())
