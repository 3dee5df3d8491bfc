"""What a reducer is, and which ranks reduce together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from torch.distributed import Store

from lightning_llmscale.collectives.links import Watch

__all__ = ["Group", "Reducer"]


class Reducer(Protocol):
    """Sums tensors over ranks, one at a time, in the same order on all ranks."""

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale`` times its sum over ranks; all ranks end with identical bits.

        Args:
            flat: Contiguous 1-D CPU tensor of fp32, fp64, fp16 or bf16, of equal length and dtype on all ranks.
            scale: Factor applied once, after the sum.
            stream: Names a tensor that comes again in later steps. Only such tensors may travel through a lossy wire,
                and error feedback remembers them by it. ``None``: the tensor is to travel exactly.

        Raises:
            ConfigurationError: The tensor cannot be reduced here.
            PeerFailureError: A peer died, left, was silent for too long or reduces something else. The content of
                ``flat`` is then undefined and the reducer cannot be used again.
        """

    def close(self, reason: str | None = None) -> None:
        """Leave the group and free what it holds; safe to repeat, and to call while another thread waits in it.

        Args:
            reason: What peers that still wait are told; by default, that this rank closed its reducer.
        """


@dataclass(frozen=True)
class Group:
    """The ranks that reduce together.

    Args:
        members: Their global ranks, in the order of the ring and of summation.
        hosts: Machine name of each member.
        store: A store that all members reach, used to meet.
        watch: Ends waits; also knows which rank this is.
    """

    members: tuple[int, ...]
    hosts: tuple[str, ...]
    store: Store
    watch: Watch

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def position(self) -> int:
        """Index of this rank among the members."""
        return self.members.index(self.watch.rank)

    def subset(self, members: Sequence[int]) -> Group:
        """Some of the members, perhaps in another order; this rank must be one of them."""
        hosts = tuple(self.hosts[self.members.index(member)] for member in members)
        return replace(self, members=tuple(members), hosts=hosts)
