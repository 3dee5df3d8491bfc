"""Strategies with a planted fault, to show that the conformance tests can fail."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_llmscale import RingAllReduceStrategy

__all__ = ["DriftsOnRank1", "Shuffles", "SumsGradients"]


class SumsGradients(RingAllReduceStrategy):
    """Adds gradients up over ranks instead of averaging them."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss * self.world_size, *args, **kwargs)


class DriftsOnRank1(RingAllReduceStrategy):
    """Rank 1 leaves the others by one part in a million per step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self.global_rank == 1 and self.lightning_module is not None:
            with torch.no_grad():
                next(self.lightning_module.parameters()).mul_(1 + 1e-6)
        return output


class Shuffles(DDPStrategy):
    """Lightning's own: shuffles training data that the user did not ask to shuffle."""
