"""All-reduce in two steps whatever the number of ranks: everybody sends each part to its owner, owners send results
back.

A direct (all-to-all) reduce-scatter and all-gather move the same bytes through each rank's link as a ring, in two
latencies instead of ``2 (n - 1)``, over ``n - 1`` connections. A value is rounded at most twice, once on its way to the
owner and once on the way back, where a ring would round partial sums at every hop: lossy wires therefore belong here.

The owner adds contributions in rank order, so the result does not depend on topology or timing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from lightning_llmscale.collectives.across import Across
from lightning_llmscale.collectives.chunks import bytes_of, check_flat, chunk_bounds
from lightning_llmscale.collectives.codecs import Codec, encode_with_feedback
from lightning_llmscale.collectives.frames import FrameReader, FrameSender
from lightning_llmscale.collectives.links import LinkClosedError, Rendezvous, connect_links
from lightning_llmscale.collectives.protocol import Group
from lightning_llmscale.errors import ConfigurationError, PeerFailureError

__all__ = ["DirectReducer"]

_BUFFERS = 4  # encoded segments that may still be on their way out, see _all_reduce


class DirectReducer:
    """Reduces over a full mesh of sockets, optionally through a lossy wire with error feedback.

    Args:
        group: At least two ranks, in the order of summation.
        segment_bytes: Size, before encoding, of the pieces of a part that travel while others are added.
        codec: Format on the wire; ``None`` sends tensors as they are. Tensors without a ``stream`` are never encoded.
        error_feedback: Whether what encoding drops is added to the next tensor of the same stream.
        across: Sums the part this rank owns over other groups too, while this one goes on with the next segment; closed
            with this reducer.

    Raises:
        ConfigurationError: A rank runs another version of this wire.
        PeerFailureError: A rank did not show up.
    """

    def __init__(
        self,
        group: Group,
        *,
        segment_bytes: int = 256 << 10,
        codec: Codec | None = None,
        error_feedback: bool = False,
        across: Across | None = None,
    ) -> None:
        self._position, self._size, self._watch = group.position, group.size, group.watch
        self._across = across
        self._lag = 0 if across is None else 1
        self._segment_bytes = segment_bytes
        self._codec, self._error_feedback = codec, error_feedback and codec is not None
        self._residuals: dict[Hashable, _Residual] = {}
        self._operations = 0
        self._closed = False
        self._doing = ""
        rendezvous = Rendezvous(group.store, group.members, group.watch, "direct")
        before, after = group.members[: self._position], group.members[self._position + 1 :]
        dialled, accepted = connect_links(rendezvous, group.hosts, dial=before, accept=after)
        links = {**dialled, **accepted}
        self._links = {group.members.index(rank): link for rank, link in links.items()}
        self._readers = {peer: FrameReader(link, group.watch.rank) for peer, link in self._links.items()}
        self._sender = FrameSender(list(links.values()), heartbeat_seconds=min(1.0, self._watch.peer_timeout / 4))

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale`` times its sum over all ranks.

        Args:
            flat: Contiguous 1-D CPU tensor, of equal length and dtype on all ranks.
            scale: Factor applied once, by the owner of each part.
            stream: Names the tensor across calls: it is encoded, and its error fed back. ``None`` sends it exactly.

        Raises:
            ConfigurationError: The tensor cannot be reduced here.
            PeerFailureError: A peer died, left, was silent for too long or reduces something else.
        """
        check_flat(flat)
        codec = self._codec if stream is not None else None
        if codec is not None and flat.dtype != torch.float32:
            raise ConfigurationError(
                f"wire={codec.name!r} encodes fp32 gradients and these are {flat.dtype}; use wire='fp32', which sends "
                "tensors as they are."
            )
        self._operations += 1
        self._doing = f"all-reduce {self._operations}"
        self._watch.check_open(self._closed, self._doing)
        try:
            with self.heartbeats():
                exchange = _Exchange(flat.detach(), self._size, self._segment_bytes, codec)
                self._all_reduce(exchange, scale, stream)
        except LinkClosedError as error:
            self._watch.check_open(self._closed, self._doing)
            failure = self._watch.closed(error, self._doing)
            self._leave(error.farewell or str(failure))
            raise failure from error
        except PeerFailureError as error:
            self._leave(str(error))
            raise

    def forget_residuals(self) -> None:
        """Drop what earlier encodings left over: the streams now name other tensors."""
        self._residuals.clear()

    def _residual(self, exchange: _Exchange, stream: Hashable | None) -> _Residual | None:
        if exchange.codec is None or not self._error_feedback:
            return None
        own = exchange.slice(self._position)
        residual = self._residuals.get(stream)
        if residual is None or residual.contributions.numel() != exchange.flat.numel():
            residual = _Residual(torch.zeros_like(exchange.flat), torch.zeros(own.stop - own.start), own.start)
            self._residuals[stream] = residual
        return residual

    def _all_reduce(self, exchange: _Exchange, scale: float, stream: Hashable | None) -> None:
        # Everyone sends, and everyone expects, in the same order: segment by segment, to position + 1, position + 2,
        # ..., from position - 1, position - 2, .... So whichever message is next in that order anywhere can always be
        # delivered, and one sender thread cannot deadlock. An encoded segment's memory is reused four segments later:
        # by then each peer has answered it.
        count, lag = exchange.count, self._lag
        residual = self._residual(exchange, stream)
        sums: list[Future[Tensor]] = []
        self._contribute(exchange, 0, residual)
        for index in range(count + 1 + lag):
            if index + 1 < count:
                self._contribute(exchange, index + 1, residual)
            if index < count:
                own = self._sum(exchange, index, scale if self._across is None else 1.0)
                if self._across is not None:
                    sums.append(self._across.submit(own, scale, None if stream is None else (stream, index)))
            if 0 <= index - lag < count:
                if self._across is not None:
                    self._across.wait(sums[index - lag], self._tick)
                self._publish(exchange, index - lag, residual)
            if index >= 1 + lag:
                self._collect(exchange, index - 1 - lag)
        self._sender.flush(self._tick)

    def _contribute(self, exchange: _Exchange, index: int, residual: _Residual | None) -> None:
        """Send segment ``index`` of each part to its owner."""
        for peer in self._after():
            segment = exchange.segment(peer, index)
            payload = segment
            if exchange.codec is not None:
                payload = exchange.wire(exchange.outgoing[index % _BUFFERS][peer], segment.numel())
                kept = residual.contributions[exchange.slice(peer, index)] if residual else None
                encode_with_feedback(exchange.codec, segment, payload, kept)
            self._put(exchange, peer, 2 * index, payload)

    def _sum(self, exchange: _Exchange, index: int, scale: float) -> Tensor:
        """Receive all contributions to segment ``index`` of the own part, and add them in rank order."""
        own = exchange.segment(self._position, index)
        wires = [exchange.wire(arrived, own.numel()) for arrived in exchange.arrived]
        for peer in self._before():
            self._receive(exchange, peer, 2 * index, wires[peer])
        total, converted = exchange.total[: own.numel()], exchange.converted[: own.numel()]
        for peer, wire in enumerate(wires):
            if peer == self._position:
                source = own
            elif exchange.codec is not None:
                exchange.codec.decode(wire, converted)
                source = converted
            else:
                source = wire.view(own.dtype)
            if peer == 0:
                total.copy_(source)
            else:  # an add_ of mixed types takes twice as long
                total.add_(source if source.dtype == total.dtype else converted.copy_(source))
        return own.copy_(total.mul_(scale) if scale != 1.0 else total)

    def _publish(self, exchange: _Exchange, index: int, residual: _Residual | None) -> None:
        """Send the finished segment ``index`` of the own part to everybody."""
        own = exchange.segment(self._position, index)
        payload = own
        if exchange.codec is not None:
            payload = exchange.wire(exchange.outgoing[index % _BUFFERS][self._position], own.numel())
            kept = residual.of_result(exchange.slice(self._position, index)) if residual else None
            encode_with_feedback(exchange.codec, own, payload, kept)
            exchange.codec.decode(payload, own)  # the owner takes what everybody gets: identical bits
        for peer in self._after():
            self._put(exchange, peer, 2 * index + 1, payload)

    def _collect(self, exchange: _Exchange, index: int) -> None:
        """Receive the finished segment ``index`` of every other part."""
        for peer in self._before():
            segment = exchange.segment(peer, index)
            if exchange.codec is None:
                self._receive(exchange, peer, 2 * index + 1, segment)
            else:
                wire = exchange.wire(exchange.arrived[peer], segment.numel())
                self._receive(exchange, peer, 2 * index + 1, wire)
                exchange.codec.decode(wire, segment)

    def _after(self) -> list[int]:
        return [(self._position + shift) % self._size for shift in range(1, self._size)]

    def _before(self) -> list[int]:
        return [(self._position - shift) % self._size for shift in range(1, self._size)]

    def _put(self, exchange: _Exchange, peer: int, number: int, payload: Tensor) -> None:
        place = {"operation": self._operations, "segment": number, "total_bytes": exchange.total_bytes}
        self._sender.put(self._links[peer], bytes_of(payload), **place)

    def _receive(self, exchange: _Exchange, peer: int, number: int, target: Tensor) -> None:
        reader = self._readers[peer]

        def tick() -> None:
            self._tick()
            self._watch.check(reader.last_sign, f"rank {reader.peer}", self._doing)

        place = {"operation": self._operations, "segment": number, "total_bytes": exchange.total_bytes}
        reader.receive(bytes_of(target), tick, **place)

    def _tick(self) -> None:
        if self._sender.error is not None:
            raise self._sender.error

    def _leave(self, reason: str) -> None:
        """Tell all peers why, then close, so that they fail now and not at their own timeout."""
        if self._across is not None:
            self._across.close(reason)
        self._sender.close(reason)
        for link in self._links.values():
            link.close()

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """While the body runs, tell all peers now and then that this rank is alive and on its way."""
        with self._sender.heartbeats(), self._across.taking_part() if self._across else contextlib.nullcontext():
            yield

    def close(self, reason: str | None = None) -> None:
        """Leave the group; an all-reduce under way, here or on a peer, ends with an error that gives ``reason``."""
        self._closed = True
        self._leave(reason or f"rank {self._watch.rank} closed its reducer")


@dataclass
class _Residual:
    """What encoding has dropped so far of one stream: of the contributions to others, and of the own part's result."""

    contributions: Tensor
    result: Tensor
    begin: int

    def of_result(self, place: slice) -> Tensor:
        """The residual of the result at ``place`` of the whole tensor."""
        return self.result[place.start - self.begin : place.stop - self.begin]


class _Exchange:
    """How one tensor is cut into parts (one per owner) and each part into ``count`` segments, and the buffers for
    it."""

    def __init__(self, flat: Tensor, size: int, segment_bytes: int, codec: Codec | None) -> None:
        self.flat = flat
        self.codec = codec
        self.total_bytes = flat.numel() * flat.element_size()
        parts = chunk_bounds(flat.numel(), size)
        longest = parts[1]
        self.count = -(-longest * flat.element_size() // segment_bytes) or 1
        self._segments = [
            [begin + offset for offset in chunk_bounds(end - begin, self.count)]
            for begin, end in itertools.pairwise(parts)
        ]
        capacity = -(-longest // self.count)
        accumulator = flat.dtype if flat.dtype == torch.float64 else torch.float32
        self.total, self.converted = torch.empty(2, capacity, dtype=accumulator)
        wire = capacity * flat.element_size() if codec is None else codec.wire_bytes(capacity)
        wire = -(-wire // 8 or -1) * 8  # each row aligned for any type
        self.arrived = torch.empty(size, wire, dtype=torch.uint8)
        self.outgoing = torch.empty(_BUFFERS if codec else 0, size, wire, dtype=torch.uint8)

    def slice(self, owner: int, index: int | None = None) -> slice:
        """Where ``owner``'s part, or segment ``index`` of it, lies in the tensor."""
        bounds = self._segments[owner]
        return slice(bounds[0], bounds[-1]) if index is None else slice(bounds[index], bounds[index + 1])

    def segment(self, owner: int, index: int) -> Tensor:
        """Segment ``index`` of ``owner``'s part."""
        return self.flat[self.slice(owner, index)]

    def wire(self, buffer: Tensor, length: int) -> Tensor:
        """The bytes of a buffer that ``length`` values fill."""
        return buffer[: length * self.flat.element_size() if self.codec is None else self.codec.wire_bytes(length)]
