"""The exact global mean: how much each rank's loss counts.

A loss that is a mean over its batch must be averaged over ranks in proportion to what each rank's batch holds:

* *Sample counts.* In one global batch ``i`` rank ``r`` holds ``n[r, i]`` of ``N[i]`` samples; its loss counts
  ``n[r, i] / N[i]``. Accumulated batches count ``1 / accumulate_grad_batches`` each, as in plain Lightning.
* *Declared weights.* ``training_step`` returns ``{"loss": ..., "loss_weight": w}`` (tokens, say). Over all ranks and
  the whole accumulation window, also an incomplete one, the gradient is ``sum(w * grad) / sum(w)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_llmscale.errors import ConfigurationError

__all__ = ["LossWeighting"]

LOSS_WEIGHT = "loss_weight"


@dataclass
class LossWeighting:
    """Scales losses before backward and tells the reducer how to scale sums.

    Args:
        replicas: Number of data replicas R.
        replica: Index of this one.
        total: Sum of a number over all replicas (a collective).
    """

    replicas: int
    replica: int
    total: Callable[[float], float]
    share: float = field(default=1.0, init=False)
    """R times this replica's part of the current batch's samples; 1 when all hold the same number."""
    reduction_scale: float = field(init=False)
    """Factor that turns the sum of gradients over replicas into the mean."""

    def __post_init__(self) -> None:
        self.reduction_scale = 1.0 / self.replicas
        self._declared: float | None = None
        self._window = 0.0
        self._window_open = False
        self._unit: float | None = None

    def begin(self, sizes: Sequence[int] | None) -> None:
        """Start a batch in which replica ``r`` holds ``sizes[r]`` samples (None: all the same)."""
        self._declared = None
        if sizes is None or min(sizes) == max(sizes):
            self.share = 1.0
        else:
            self.share = sizes[self.replica] * self.replicas / sum(sizes)

    def observe(self, output: Any, automatic: bool) -> None:
        """Take the declared weight from what ``training_step`` returned.

        Raises:
            ConfigurationError: If the weight is negative or not finite, was declared for some batches of a window only,
                or cannot take effect because the module optimises by hand.
        """
        declared = output.get(LOSS_WEIGHT) if isinstance(output, Mapping) else None
        if declared is None:
            if self._window_open:
                raise ConfigurationError(
                    "training_step returned loss_weight for an earlier batch of this accumulation window but not for "
                    "this one; return it for every batch"
                )
            return
        weight = float(declared)
        if not automatic:
            raise ConfigurationError(
                "training_step returned loss_weight under manual optimization, where it cannot take effect; "
                "scale the loss before manual_backward instead"
            )
        if not math.isfinite(weight) or weight < 0:
            raise ConfigurationError(
                f"training_step returned loss_weight={weight}; it must be a finite number >= 0, such as a token count"
            )
        self._declared = weight if self.share > 0 else 0.0

    def scale(self, loss: Tensor, accumulate: int, boundary: bool) -> Tensor:
        """The loss to differentiate.

        Args:
            loss: Scalar; the batch's mean divided by `accumulate`, as Lightning hands it over.
            accumulate: ``accumulate_grad_batches``.
            boundary: Whether gradients are reduced after this batch.
        """
        if self._declared is None:
            self.reduction_scale = 1.0 / self.replicas
            return loss if self.share == 1.0 else loss * self.share
        weight = self._declared
        if self._unit is None:
            # keeps the scale of gradients near that of a plain mean, which matters to half precision
            self._unit = self.total(weight) / self.replicas or 1.0
        unit = self._unit
        self._window += weight
        self._window_open = not boundary
        if boundary:
            whole, self._window = self.total(self._window), 0.0
            self.reduction_scale = unit / whole if whole > 0 else 0.0
            self._unit = whole / (self.replicas * accumulate) or 1.0
        return loss * (accumulate * weight / unit)
