"""How far two tensors are apart, as one number."""

from __future__ import annotations

__all__ = ["difference", "floor_of", "largest_finite"]

from collections.abc import Iterable

import torch
from torch import Tensor

#: Part of the largest value of all tensors that a difference is at least relative to: a gradient that is zero but for
#: rounding (the key bias of attention) must not look wrong, and one that is wrong by a factor still does.
_FLOOR = 0.1


def difference(ours: Tensor, reference: Tensor, floor: float = 0.0) -> tuple[float, int]:
    """Largest difference of two tensors, relative to the largest value of the reference.

    Args:
        ours: Any shape and type.
        reference: The same shape; otherwise the difference is infinite.
        floor: Smallest value to be relative to.

    Returns:
        The difference and the flat index of the element that has it. Infinities and NaNs equal themselves and are
        infinitely far from anything else.
    """
    if ours.shape != reference.shape:
        return float("inf"), 0
    alike = ours.layout == reference.layout == torch.strided and ours.dtype == reference.dtype
    if ours.numel() == 0 or (alike and torch.equal(ours, reference)):  # fast for ranks, which have the same bits
        return 0.0, 0
    a, b = _flat(ours), _flat(reference)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest, index = apart.max(dim=0)
    if largest == 0:
        return 0.0, 0
    scale = max(largest_finite(b), floor)
    return float(largest) / scale if scale else float("inf"), int(index)


def floor_of(tensors: Iterable[Tensor]) -> float:
    """Smallest value that differences of these tensors are relative to."""
    return _FLOOR * max((largest_finite(tensor) for tensor in tensors), default=0.0)


def largest_finite(tensor: Tensor) -> float:
    """Largest absolute value that is neither infinite nor NaN; 0 if there is none."""
    values = _flat(tensor)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _flat(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to_dense().double().flatten()
