"""How a flat tensor is cut and which piece travels when: pure functions, tested without a process."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_llmscale.errors import ConfigurationError

__all__ = ["REDUCIBLE_DTYPES", "bytes_of", "check_flat", "chunk_bounds", "ring_schedule"]

REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def chunk_bounds(length: int, parts: int) -> list[int]:
    """Cut ``range(length)`` into ``parts`` nearly equal pieces.

    Returns:
        ``parts + 1`` offsets; the first ``length % parts`` pieces are one longer, and pieces may be empty.
    """
    quotient, remainder = divmod(length, parts)
    return [part * quotient + min(part, remainder) for part in range(parts + 1)]


def ring_schedule(position: int, world_size: int) -> tuple[list[int], list[int]]:
    """Which chunk arrives from the previous rank in each step of a ring all-reduce.

    In step ``s`` of the reduce-scatter a rank adds its own values to chunk ``reduce[s]`` and passes it on; after the
    last step it owns the complete sum of that chunk. In the all-gather it receives the finished chunks ``gather``.
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.)

    Args:
        position: Position of this rank in the ring.
        world_size: Number of ranks in the ring.

    Returns:
        The chunk received in each of the ``world_size - 1`` steps of reduce-scatter and of all-gather. The first chunk
        a rank sends is its own ``position``.
    """
    steps = range(world_size - 1)
    reduce = [(position - step - 1) % world_size for step in steps]
    gather = [(position - step) % world_size for step in steps]
    return reduce, gather


def check_flat(flat: Tensor) -> None:
    """Refuse what the collectives of this package cannot reduce in place.

    Raises:
        ConfigurationError: ``flat`` is not a contiguous 1-D CPU tensor of a floating type of at most 64 bits.
    """
    if flat.device.type != "cpu":
        raise ConfigurationError(
            f"This all-reduce works on CPU memory and the tensor is on {flat.device}; use algorithm='stock' there."
        )
    if flat.dtype not in REDUCIBLE_DTYPES:
        raise ConfigurationError(
            f"Cannot all-reduce a tensor of {flat.dtype}; use one of {', '.join(map(str, REDUCIBLE_DTYPES))}."
        )
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigurationError(
            f"All-reduce needs a contiguous 1-D tensor, not shape {tuple(flat.shape)} with strides {flat.stride()}; "
            "pass tensor.view(-1)."
        )


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy."""
    return flat.detach().view(torch.uint8).numpy().data
