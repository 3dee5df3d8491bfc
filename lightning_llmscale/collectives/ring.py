"""All-reduce around a ring of sockets: reduce-scatter, then all-gather, both pipelined in segments.

Each rank sends to the next and receives from the previous one; every byte of the tensor crosses each link about twice,
whatever the number of ranks, which is the least any algorithm can do with one link per rank (Patarasuk and Yuan, 2009).
The price is ``2 (n - 1)`` latencies.

The caller receives and adds while one sender thread sends. Segments carry a header, so ranks that reduce different
tensors are told so instead of adding garbage. While it waits, a rank sends an empty heartbeat to the next once in a
while: "I am in this all-reduce and waiting myself". Silence therefore comes only from a rank that is dead, stopped,
unplugged or not in the all-reduce at all; only its direct neighbour runs into ``peer_timeout``, and tells the others
whom it missed.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_llmscale.collectives.chunks import bytes_of, check_flat, chunk_bounds, ring_schedule
from lightning_llmscale.collectives.frames import FrameReader, FrameSender
from lightning_llmscale.collectives.links import LinkClosedError, Rendezvous, connect_links
from lightning_llmscale.collectives.protocol import Group
from lightning_llmscale.errors import PeerFailureError

__all__ = ["RingReducer"]


class RingReducer:
    """Reduces around a ring of sockets: Unix sockets between neighbours on one host, TCP otherwise.

    The order of summation depends on the position in the ring only, and the owner's finished bytes are forwarded
    verbatim, so all ranks end with identical bits. Half types travel as they are and are rounded once per hop; the last
    hop adds and scales in fp32, so that in fp16 only the partial sums, not the scaled result, need to stay below 65504.

    Args:
        group: At least two ranks, in the order of the ring.
        segment_bytes: Size of the pieces that are sent, added and forwarded; a multiple of 8.

    Raises:
        ConfigurationError: A rank runs another version of this wire.
        PeerFailureError: A neighbour did not show up.
    """

    def __init__(self, group: Group, *, segment_bytes: int = 512 << 10) -> None:
        self._position, self._size, self._watch = group.position, group.size, group.watch
        self._segment_bytes = segment_bytes
        self._operations = 0
        self._closed = False
        self._received = torch.empty(segment_bytes, dtype=torch.uint8)
        self._scratch = torch.empty(0), torch.empty(0)
        rendezvous = Rendezvous(group.store, group.members, group.watch, "ring")
        before = group.members[self._position - 1]
        after = group.members[(self._position + 1) % self._size]
        dialled, accepted = connect_links(rendezvous, group.hosts, dial=[after], accept=[before])
        self._previous, self._next = accepted[before], dialled[after]
        self._reader = FrameReader(self._previous, group.watch.rank)
        self._sender = FrameSender([self._next], heartbeat_seconds=min(1.0, group.watch.peer_timeout / 4))
        self._transfer = _Transfer(0, 0, 0)

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale`` times its sum over all ranks.

        Args:
            flat: Contiguous 1-D CPU tensor, of equal length and dtype on all ranks.
            scale: Factor applied once, by the owner of each chunk.
            stream: Of no account: a ring sends every tensor as it is.

        Raises:
            ConfigurationError: The tensor cannot be reduced here.
            PeerFailureError: A peer died, left, was silent for too long or reduces something else.
        """
        check_flat(flat)
        self._operations += 1
        self._watch.check_open(self._closed, f"all-reduce {self._operations}")
        try:
            self._all_reduce(flat.detach(), scale)
        except LinkClosedError as error:
            self._watch.check_open(self._closed, self._doing())
            if error.farewell is None and error.peer == self._next.peer and (words := self._next.poll()):
                error.farewell = words.decode(errors="replace")
            failure = self._watch.closed(error, self._doing())
            self._leave(error.farewell or str(failure))
            raise failure from error
        except PeerFailureError as error:
            self._leave(str(error))
            raise

    def _all_reduce(self, flat: Tensor, scale: float) -> None:
        bounds = chunk_bounds(flat.numel(), self._size)
        step = self._segment_bytes // flat.element_size()
        chunks = [
            [flat[start : min(start + step, end)] for start in range(begin, end, step)]
            for begin, end in itertools.pairwise(bounds)
        ]
        reduce, gather = ring_schedule(self._position, self._size)
        sends = sum(len(chunk) for chunk in chunks) * 2 - len(chunks[gather[-1]]) - len(chunks[reduce[-1]])
        self._transfer = _Transfer(self._operations, flat.numel() * flat.element_size(), sends)
        with self._sender.heartbeats():
            for segment in chunks[self._position]:
                self._send(segment)
            for chunk in reduce:
                for segment in chunks[chunk]:
                    arrived = self._received[: segment.numel() * segment.element_size()]
                    self._receive(arrived)
                    self._add(segment, arrived.view(flat.dtype), scale if chunk == reduce[-1] else None)
                    self._send(segment)
            # A chunk may be overwritten here only after its bytes of the reduce-scatter have left this rank. They have:
            # the finished chunk can arrive only after every rank, this one's successor included, has added to it.
            for chunk in gather:
                for segment in chunks[chunk]:
                    self._receive(segment)
                    if chunk != gather[-1]:
                        self._send(segment)
            self._sender.flush(self._tick)

    def _add(self, segment: Tensor, arrived: Tensor, scale: float | None) -> None:
        """Add what arrived; on the last hop (``scale`` given) in fp32, so that the result is rounded once."""
        if scale is None or segment.dtype in (torch.float32, torch.float64):
            segment.add_(arrived)
            if scale is not None and scale != 1.0:
                segment.mul_(scale)
            return
        if not self._scratch[0].numel():
            self._scratch = torch.empty(self._segment_bytes // 2), torch.empty(self._segment_bytes // 2)
        total, converted = (scratch[: segment.numel()] for scratch in self._scratch)
        total.copy_(segment).add_(converted.copy_(arrived)).mul_(scale)
        segment.copy_(total)

    def _send(self, segment: Tensor) -> None:
        transfer = self._transfer
        self._sender.put(
            self._next,
            bytes_of(segment),
            operation=transfer.operation,
            segment=transfer.sent,
            total_bytes=transfer.total_bytes,
        )
        transfer.sent += 1

    def _receive(self, target: Tensor) -> None:
        """The next segment from the previous rank, straight into ``target``."""
        transfer = self._transfer
        self._reader.receive(
            bytes_of(target),
            self._tick,
            operation=transfer.operation,
            segment=transfer.received,
            total_bytes=transfer.total_bytes,
        )
        transfer.received += 1

    def _tick(self) -> None:
        """A poll interval has passed without completing a transfer."""
        if self._sender.error is not None:
            raise self._sender.error
        # Nothing but a farewell ever travels backwards. A successor that left after it got all it needed is no failure.
        if self._transfer.sent < self._transfer.sends or self._sender.busy:
            words = self._next.poll()
            if words is not None:
                raise LinkClosedError(self._next.peer, words.decode(errors="replace"))
        self._watch.check(self._reader.last_sign, f"rank {self._previous.peer}", self._doing())

    def _doing(self) -> str:
        return f"segment {self._transfer.received} of all-reduce {self._transfer.operation}"

    def _leave(self, reason: str) -> None:
        """Tell both neighbours why, then close, so that they fail now and not at their own timeout."""
        with contextlib.suppress(OSError):
            self._previous.socket.send(reason.encode(), socket.MSG_DONTWAIT)
        self._sender.close(reason)
        self._previous.close()
        self._next.close()

    def heartbeats(self) -> AbstractContextManager[None]:
        """While the body runs, tell the next rank now and then that this one is alive and on its way."""
        return self._sender.heartbeats()

    def close(self, reason: str | None = None) -> None:
        """Leave the ring; an all-reduce under way, here or on a peer, ends with an error that gives ``reason``."""
        self._closed = True
        self._leave(reason or f"rank {self._watch.rank} closed its reducer")


@dataclass
class _Transfer:
    """Progress of one all-reduce on this rank, counted in segments."""

    operation: int
    total_bytes: int
    sends: int
    sent: int = 0
    received: int = 0
