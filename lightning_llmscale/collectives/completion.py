"""Parameters that take no part in a step's loss, under a reducer that waits for every parameter.

``DistributedDataParallel`` reduces a bucket once each of its parameters has a gradient. Its own remedy for parameters
that a loss does not reach walks the autograd graph of every step and adds a collective of the main process group. Here
a hook notes which parameters backward reached; those it did not are given a zero gradient by a second, empty backward
on the rank concerned alone, which completes the buckets. A parameter that no rank used keeps ``grad = None``, as in one
process, so that optimizers leave it and its state alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.futures import Future

from lightning_llmscale.errors import ConfigurationError

__all__ = ["BackwardCompletion"]


class BackwardCompletion:
    """Completes the reduction of one backward.

    Args:
        parameters: The parameters that the reducer waits for, in the same order on all ranks.
        submit: Sums a flat CPU tensor over ranks, behind all reductions submitted before.
        strict: Whether a gradient outside `begin` and `end` is an error; with a single rank it does no harm.
    """

    def __init__(
        self, parameters: Iterable[Tensor], submit: Callable[[Tensor], Future[Tensor]], strict: bool = True
    ) -> None:
        self._parameters = list(parameters)
        self._submit = submit
        self._reached: set[int] = set()
        self._open, self._strict = False, strict
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def _note(self, parameter: Tensor) -> None:
        if self._strict and not self._open:
            raise ConfigurationError(
                "gradients were computed by loss.backward(), past the strategy, and would not be averaged over ranks; "
                "call self.manual_backward(loss) instead"
            )
        self._reached.add(id(parameter))

    def begin(self) -> None:
        """Open a backward and forget the last."""
        self._open = True
        self._reached.clear()

    def end(self) -> None:
        """Close the backward; gradients that come outside one are an error."""
        self._open = False

    def complete(self) -> None:
        """Complete a backward whose gradients are reduced (a collective; it waits where something is missing)."""
        missing = [p for p in self._parameters if id(p) not in self._reached]
        had_gradient = {id(p) for p in missing if p.grad is not None}  # from earlier batches of an accumulation window
        used = torch.ones(len(self._parameters))
        if missing:
            for index, parameter in enumerate(self._parameters):
                used[index] = float(id(parameter) in self._reached or id(parameter) in had_gradient)
            _backward_of_zeros(missing)
        counts = self._submit(used)
        if not missing:
            return
        total = counts.wait()
        for index, parameter in enumerate(self._parameters):
            if total[index] == 0:
                parameter.grad = None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _backward_of_zeros(parameters: list[Tensor]) -> None:
    """Let autograd add a zero gradient to each parameter, frozen ones (a toggled optimizer's, say) included."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
