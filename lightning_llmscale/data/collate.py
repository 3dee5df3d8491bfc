"""Make a batch of a list of items."""

from __future__ import annotations

__all__ = ["collate_samples", "collate_sequences"]

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_llmscale.errors import DataError


def collate_samples(samples: list[dict[str, Any]]) -> Any:
    """Stack samples as torch's ``default_collate`` does.

    Raises:
        DataError: Samples have different extensions, or values that cannot be stacked.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        first = samples[0]
        where = f"; the first is {first['__key__']!r} of {first['__url__']}" if isinstance(first, dict) else ""
        raise DataError(
            f"The {len(samples)} samples of a batch cannot be stacked ({str(error).splitlines()[0]}{where}); give the "
            f"DataModule a collate function, or a transform that makes them alike."
        ) from error


def collate_sequences(sequences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack sequences of equal length."""
    return {name: torch.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}
