"""Gradient buckets of ``DistributedDataParallel`` reduced by this package instead of its process group."""

# No "from __future__ import annotations": DDP compares the annotations of a hook with classes, not with their names.
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from lightning_llmscale.collectives.engine import CommunicationThread

__all__ = ["BucketReduction", "reduce_bucket"]


@dataclass
class BucketReduction:
    """State of :func:`reduce_bucket`.

    Args:
        thread: Reduces the buckets, in the order in which DDP finishes them (equal on all ranks).
        scale: Factor on the sum, normally ``1 / world_size``; may be changed between steps, alike on all ranks.
    """

    thread: CommunicationThread
    scale: float


def reduce_bucket(state: BucketReduction, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook: ``ddp.register_comm_hook(BucketReduction(thread, 1 / world_size), reduce_bucket)``."""
    return state.thread.submit(bucket.buffer(), state.scale)
