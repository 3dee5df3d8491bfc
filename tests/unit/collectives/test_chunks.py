"""Cutting and scheduling are pure: checked against their definition, and the ring by passing numbers around by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llmscale.collectives.chunks import bytes_of, check_flat, chunk_bounds, ring_schedule
from lightning_llmscale.errors import ConfigurationError


@given(length=st.integers(0, 10_000), parts=st.integers(1, 50))
def test_chunks_tile_the_range_and_differ_by_one_at_most(length: int, parts: int) -> None:
    bounds = chunk_bounds(length, parts)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (0, length, parts)
    assert sizes.max() - sizes.min() <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
def test_schedule_leaves_the_sum_of_each_chunk_on_every_rank(world_size: int) -> None:
    values = np.arange(world_size * world_size).reshape(world_size, world_size)  # rank, chunk
    held = values.copy()
    schedules = [ring_schedule(rank, world_size) for rank in range(world_size)]
    sent = list(range(world_size))  # the chunk each rank passes on next: at first its own
    for phase in (0, 1):
        for step in range(world_size - 1):
            arriving = [held[rank - 1, sent[rank - 1]] for rank in range(world_size)]
            expected = [schedules[rank][phase][step] for rank in range(world_size)]
            assert expected == [sent[rank - 1] for rank in range(world_size)]
            for rank, chunk in enumerate(expected):
                held[rank, chunk] = arriving[rank] + (held[rank, chunk] if phase == 0 else 0)
            sent = expected
    np.testing.assert_array_equal(held, np.tile(values.sum(axis=0), (world_size, 1)))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 2), "1-D"),
        (torch.zeros(8)[::2], "contiguous"),
        (torch.zeros(4, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_reduced_is_refused_with_its_reason(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_flat(tensor)


def test_bytes_share_the_memory_of_the_tensor() -> None:
    flat = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    view = bytes_of(flat)
    view[:] = torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert flat.tolist() == [1.0, 1.0, 1.0]
