"""What gradients look like on the wire: fp32 as they are, bf16, or int8 in blocks.

A codec is a set of pure functions over flat fp32 tensors of any length; it keeps no state. What the wire drops can be
kept by the sender and added to the next gradient of the same tensor (*error feedback*: Seide et al., "1-bit stochastic
gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019): see :func:`encode_with_feedback`.

A NaN or Inf anywhere arrives as something non-finite: bf16 has both, and int8 blocks carry them in their scale.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_llmscale.errors import ConfigurationError

__all__ = ["WIRES", "BFloat16", "Codec", "Int8Blocks", "Wire", "encode_with_feedback", "make_codec"]

Wire = Literal["fp32", "bf16", "int8"]
"""Format of gradients on the wire."""

WIRES: tuple[str, ...] = get_args(Wire)

_LANES = 256


class Codec(Protocol):
    """Encodes flat fp32 tensors into bytes and back."""

    name: str

    def wire_bytes(self, length: int) -> int:
        """Bytes that ``length`` values take on the wire."""

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Write ``values`` (fp32, 1-D) to ``wire`` (uint8, ``wire_bytes(len(values))`` long)."""

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Write what ``wire`` says to ``values``; the same bits wherever it is done."""


class BFloat16:
    """The upper half of each fp32: the same range, 8 bits of precision, half the bytes."""

    name = "bf16"

    def wire_bytes(self, length: int) -> int:
        """Two bytes per value."""
        return 2 * length

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Round to the nearest bf16."""
        wire.view(torch.bfloat16).copy_(values)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Widen; exact."""
        values.copy_(wire.view(torch.bfloat16))


class Int8Blocks:
    """Integers of -127..127 with one fp32 scale per block, about a quarter of the bytes.

    The values are laid out as rows of 256; a block is one *column*, because the largest value of each column is found
    at vector speed where that of each row is not (1.06 against 0.1 to 0.4 GB/s of fp32 on one core). Encoding in pieces
    of about 64 K values gives blocks of 256 and 1.6 % overhead for the scales; the relative error is about 0.9 %.
    """

    name = "int8"

    def wire_bytes(self, length: int) -> int:
        """One byte per value, rounded up to whole rows, after 256 scales of four bytes."""
        return 4 * _LANES + -(-length // _LANES) * _LANES if length else 0

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Divide each block by its largest magnitude and round."""
        if not values.numel():
            return
        whole = values.numel() // _LANES * _LANES
        scales, integers = wire[: 4 * _LANES].view(torch.float32), wire[4 * _LANES :].view(torch.int8)
        rows = values[:whole].view(-1, _LANES)
        tail = values.new_zeros(_LANES)
        tail[: values.numel() - whole].copy_(values[whole:])
        torch.abs(tail, out=scales)
        if whole:
            torch.maximum(scales, rows.abs().amax(0), out=scales)
        # No block of zeros divides by zero; below the clamp the scale makes whatever the integers say negligible.
        factors = 127.0 / scales.clamp_min(1e-30)
        if whole:
            integers[:whole].view(-1, _LANES).copy_(torch.mul(rows, factors).round_())
        if whole < values.numel():
            integers[whole:].copy_(tail.mul_(factors).round_())

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Multiply back; a block whose scale is not finite becomes non-finite as a whole."""
        if not values.numel():
            return
        whole = values.numel() // _LANES * _LANES
        factors = wire[: 4 * _LANES].view(torch.float32) * (1 / 127)
        integers = wire[4 * _LANES :].view(torch.int8)
        values.copy_(integers[: values.numel()])
        values[:whole].view(-1, _LANES).mul_(factors)
        values[whole:].mul_(factors[: values.numel() - whole])


def make_codec(wire: str) -> Codec | None:
    """The codec of a wire format; ``None`` for ``"fp32"``, where tensors travel as they are.

    Raises:
        ConfigurationError: Unknown format.
    """
    if wire not in WIRES:
        raise ConfigurationError(f"Unknown wire {wire!r}; use one of {', '.join(map(repr, WIRES))}.")
    codecs: dict[str, Codec] = {"bf16": BFloat16(), "int8": Int8Blocks()}
    return codecs.get(wire)


def encode_with_feedback(codec: Codec, values: Tensor, wire: Tensor, residual: Tensor | None) -> None:
    """Encode ``values`` plus what earlier encodings dropped, and keep what this one drops.

    Args:
        codec: The codec.
        values: Flat fp32 tensor; holds the values plus residual afterwards.
        wire: Where the bytes go.
        residual: Flat fp32 tensor of the same length, updated; ``None`` for no feedback.
    """
    if residual is None:
        codec.encode(values, wire)
        return
    values.add_(residual)
    codec.encode(values, wire)
    codec.decode(wire, residual)
    torch.sub(values, residual, out=residual)
    # A gradient that overflowed is skipped by the optimizer; kept here, it would poison every later one.
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
