"""Gradient buckets of ``DistributedDataParallel`` reduced by this package instead of its process group."""

# No "from __future__ import annotations": DDP compares the annotations of a hook with classes, not with their names.
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from lightning_llmscale.collectives.engine import CommunicationThread

__all__ = ["BucketReduction", "StockReduction", "reduce_bucket", "reduce_bucket_stock"]


@dataclass
class BucketReduction:
    """State of :func:`reduce_bucket`.

    Args:
        thread: Reduces the buckets, in the order in which DDP finishes them (equal on all ranks).
        scale: Factor on the sum, normally ``1 / world_size``; may be changed between steps, alike on all ranks.
    """

    thread: CommunicationThread
    scale: float
    _layouts: int = field(default=0, init=False)
    _parameters: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)

    def stream(self, bucket: GradBucket) -> tuple[int, int]:
        """A name for the bucket that changes when DDP fills its buckets anew, which it does after the first step."""
        parameters = tuple(parameter.data_ptr() for parameter in bucket.parameters())
        if self._parameters.setdefault(bucket.index(), parameters) != parameters:
            self._parameters = {bucket.index(): parameters}
            self._layouts += 1
        return self._layouts, bucket.index()


def reduce_bucket(state: BucketReduction, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook: ``ddp.register_comm_hook(BucketReduction(thread, 1 / world_size), reduce_bucket)``."""
    if bucket.buffer().is_sparse:
        return _reduce_sparse(bucket.buffer(), state.scale)
    return state.thread.submit(bucket.buffer(), state.scale, state.stream(bucket))


def _reduce_sparse(gradient: Tensor, scale: float) -> Future[Tensor]:
    """Rows differ by rank, so the sum is left to torch: at once, in the order of buckets, equal on all ranks."""
    dist.all_reduce(gradient)
    done: Future[Tensor] = Future()
    done.set_result(gradient.mul_(scale))
    return done


@dataclass
class StockReduction:
    """State of :func:`reduce_bucket_stock`.

    Args:
        group: Process group whose backend serves the gradients' device, NCCL for GPUs.
        scale: As in :class:`BucketReduction`.
    """

    group: ProcessGroup
    scale: float

    def submit(self, flat: Tensor) -> Future[Tensor]:
        """Sum ``flat``, on the device of the group, over ranks."""
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


def reduce_bucket_stock(state: StockReduction, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook that leaves the sum to the process group: on GPUs nothing of ours is as fast as NCCL."""
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(state.scale))
