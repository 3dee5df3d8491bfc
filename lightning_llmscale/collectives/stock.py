"""``torch.distributed.all_reduce`` behind the interface of this package's own algorithms."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_llmscale.collectives.links import POLL_SECONDS
from lightning_llmscale.collectives.protocol import Group
from lightning_llmscale.errors import ConfigurationError, PeerFailureError

__all__ = ["StockReducer"]


class StockReducer:
    """Reduces through a gloo group of its own, so that it never mixes with collectives of the main thread.

    Args:
        group: All ranks of the default process group.

    Raises:
        ConfigurationError: No default process group is initialised, or it has another size.
    """

    def __init__(self, group: Group) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 0
        if size != group.size:
            raise ConfigurationError(
                f"algorithm='stock' needs a default process group of {group.size} ranks and it has {size}; call "
                "torch.distributed.init_process_group first."
            )
        self._watch = group.watch
        self._operations = 0
        self._closed = False
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._watch.peer_timeout))

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale`` times its sum over all ranks.

        Args:
            flat: Dense tensor on a device that gloo serves, of equal shape and dtype on all ranks.
            scale: Factor applied after the sum, on each rank alike.
            stream: Of no account: torch sends every tensor as it is.

        Raises:
            PeerFailureError: A peer is known dead, or gloo failed.
        """
        self._operations += 1
        doing = f"all-reduce {self._operations} of torch.distributed"
        done = threading.Event()
        try:
            work = dist.all_reduce(flat.detach(), group=self._group, async_op=True)
            work.get_future().add_done_callback(lambda _: done.set())
            while not done.wait(POLL_SECONDS):
                if (sentence := self._watch.failure()) is not None:
                    raise PeerFailureError(f"{sentence} (rank {self._watch.rank} was waiting in {doing})")
            work.wait()
        except RuntimeError as error:
            if isinstance(error, PeerFailureError):
                raise
            raise PeerFailureError(
                f"Rank {self._watch.rank} failed in {doing}: a peer died or was silent for "
                f"{self._watch.peer_timeout:g} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if scale != 1.0:
            flat.detach().mul_(scale)

    def close(self, reason: str | None = None) -> None:
        """Give the group up; gloo has no words for ``reason``."""
        if dist.is_initialized() and not self._closed:
            self._closed = True
            dist.destroy_process_group(self._group)
