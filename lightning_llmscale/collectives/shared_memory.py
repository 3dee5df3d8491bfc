"""All-reduce among the ranks of one host through memory they all map.

Method: the tensor passes through the windows chunk by chunk. Of each chunk a rank *stages* the parts that others own,
*reduces* the part it owns straight from its own tensor and the peers' windows, and *gathers* the finished parts of the
others. Per byte of the tensor that is about (n-1)/n copies in, one pass of additions and one copy out, where a ring
over sockets copies each byte twice more into and out of the kernel. The three stages of consecutive chunks overlap, so
a rank seldom waits, and then sleeps: each "staged" or "reduced" is one byte in a Unix socket, which wakes a sleeping
peer, orders the memory accesses, and ends (EOF) when its process dies.

The windows are anonymous (``memfd_create``, descriptors passed over the sockets): they have no name under ``/dev/shm``
that a killed run could leave behind, and do not count against that mount's size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from lightning_llmscale.collectives.across import Across
from lightning_llmscale.collectives.chunks import check_flat, chunk_bounds
from lightning_llmscale.collectives.links import POLL_SECONDS, Link, LinkClosedError, Rendezvous, Watch, connect_links
from lightning_llmscale.collectives.protocol import Group
from lightning_llmscale.errors import ConfigurationError, PeerFailureError

__all__ = ["SharedMemoryReducer"]

_SLOTS = 3
"""Chunks in flight: how far a rank may run ahead of a peer that was not scheduled for a while."""

_STAGED, _REDUCED, _ALIVE, _FAREWELL = b"S", b"R", b"A", b"F"


class SharedMemoryReducer:
    """Reduces through shared windows; half types are summed in fp32 in rank order and rounded once.

    Args:
        group: At least two ranks, all on this machine.
        chunk_bytes: Bytes of the tensor that pass through the window at a time. The window of each rank takes
            ``3 * chunk_bytes * (1 + 1 / group.size)``.
        across: Sums the part this rank owns over other groups too, while this one goes on with the next chunk; closed
            with this reducer.

    Raises:
        ConfigurationError: The ranks are on several machines, or this system lacks the memory or the facility; raised
        on
            every rank even if only one lacks it.
        PeerFailureError: A rank did not show up.
    """

    def __init__(self, group: Group, *, chunk_bytes: int = 4 << 20, across: Across | None = None) -> None:
        if len(set(group.hosts)) != 1:
            raise ConfigurationError(
                f"algorithm='shared_memory' needs all ranks on one machine and they run on {sorted(set(group.hosts))}; "
                "use algorithm='two_level', 'ring' or 'auto'."
            )
        self._position, self._size, self._watch = group.position, group.size, group.watch
        self._across = across
        self._chunk_bytes = chunk_bytes
        self._result_bytes = -(-chunk_bytes // group.size) + 8  # + 8: parts are cut in whole elements
        self._result_bytes += -self._result_bytes % 64
        self._in_use = threading.Lock()
        self._closed = False
        self._chunks_done = 0
        self._operations = 0
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._slots: dict[torch.dtype, tuple[list[list[Tensor]], list[list[Tensor]]]] = {}
        rendezvous = Rendezvous(group.store, group.members, group.watch, "shared memory")
        own = self._create_window(rendezvous)
        try:
            dialled, accepted = connect_links(
                rendezvous,
                group.hosts,
                dial=group.members[: self._position],
                accept=group.members[self._position + 1 :],
            )
            self._tokens = _TokenMesh({**dialled, **accepted}, self._watch)
            self._maps = self._map_windows(group, own)
        finally:
            os.close(own)

    def _create_window(self, rendezvous: Rendezvous) -> int:
        """Reserve this rank's window, or fail together with all ranks if any rank cannot."""
        size, descriptor, problem = self._window_bytes, -1, None
        try:
            if sys.platform != "linux":
                raise OSError(f"{sys.platform} has no memfd_create")
            descriptor = os.memfd_create("llmscale-window", os.MFD_CLOEXEC)
            # Reserves the pages now; a sparse file would end in SIGBUS on first touch when memory is short.
            os.posix_fallocate(descriptor, 0, size)
            mmap.mmap(descriptor, size).close()
        except OSError as error:
            problem = error.strerror or str(error)
        problems = {
            peer: record["problem"]
            for peer, record in zip(
                rendezvous.members, rendezvous.exchange("window", {"problem": problem}), strict=True
            )
            if record["problem"]
        }
        if problems:
            if descriptor >= 0:
                os.close(descriptor)
            peer, text = next(iter(problems.items()))
            raise ConfigurationError(
                f"Rank {peer} cannot reserve {size / 2**20:.1f} MiB of shared memory ({text}); raise the memory limit "
                "of the container, or use algorithm='ring'."
            )
        return descriptor

    @property
    def _window_bytes(self) -> int:
        return _SLOTS * (self._chunk_bytes + self._result_bytes)

    def _map_windows(self, group: Group, own: int) -> list[mmap.mmap]:
        links = self._tokens.links
        for link in links.values():
            socket.send_fds(link.socket, [b"W"], [own])
        maps = []
        for peer in group.members:
            descriptor = own if peer == self._watch.rank else self._receive_descriptor(links[peer])
            try:
                window = mmap.mmap(descriptor, self._window_bytes)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):
                        window.madvise(mmap.MADV_HUGEPAGE)
                maps.append(window)
            finally:
                if descriptor != own:
                    os.close(descriptor)
        return maps

    def _receive_descriptor(self, link: Link) -> int:
        started = time.monotonic()
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(link.socket, 1, 1)
            except BlockingIOError:
                self._watch.check(started, f"rank {link.peer}", "the exchange of shared windows")
                continue
            if not message:
                raise self._watch.closed(LinkClosedError(link.peer), "the exchange of shared windows")
            return descriptors[0]

    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        """Replace ``flat`` by ``scale`` times its sum over all ranks.

        Args:
            flat: Contiguous 1-D CPU tensor, of equal length and dtype on all ranks.
            scale: Factor applied once, by the owner of each part.
            stream: Passed on to ``across``; within the host every tensor is summed as it is.

        Raises:
            ConfigurationError: The tensor cannot be reduced here.
            PeerFailureError: A peer died, left or was silent for too long.
        """
        check_flat(flat)
        with self._in_use:
            self._operations += 1
            doing = f"all-reduce {self._operations}"
            self._watch.check_open(self._closed, doing)
            try:
                with self._across.taking_part() if self._across else contextlib.nullcontext():
                    self._all_reduce(flat.detach(), scale, stream)
            except LinkClosedError as error:
                self._watch.check_open(self._closed, doing)
                failure = self._watch.closed(error, doing)
                self._leave(error.farewell or str(failure))
                raise failure from error
            except PeerFailureError as error:
                self._leave(str(error))
                raise

    def _all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None) -> None:
        step = self._chunk_bytes // flat.element_size()
        chunks = [flat[start : start + step] for start in range(0, flat.numel(), step)]
        first, count, tokens, doing = self._chunks_done, len(chunks), self._tokens, f"all-reduce {self._operations}"
        self._chunks_done += count
        tokens.goal = self._chunks_done
        sums: list[Future[Tensor]] = []
        staged = reduced = published = gathered = 0
        # What is furthest along goes first, so that windows stay in cache; if a peer lags, staging runs ahead while
        # there are slots. None is overwritten too early: chunk i is staged only after gather(i - slots), which proves
        # that all have read what this rank staged there; and it is reduced only after all have staged it, hence have
        # gathered i - slots from the result slot.
        while gathered < count:
            heard = tokens.hear()
            if gathered < published and tokens.least(_REDUCED) > first + gathered:
                self._gather(chunks[gathered], first + gathered)
                gathered += 1
            elif self._across is not None and published < len(sums) and sums[published].done():
                self._across.check()
                self._publish(chunks[published], first + published)
                published += 1
            elif reduced < staged and tokens.least(_STAGED) > first + reduced:
                result = self._reduce(chunks[reduced], first + reduced, scale)
                reduced += 1
                if self._across is None:
                    self._publish(chunks[published], first + published)
                    published += 1
                else:
                    place = None if stream is None else (stream, reduced)
                    sums.append(self._across.submit(result, scale, place))
            elif staged < count and staged < gathered + _SLOTS:
                self._stage(chunks[staged], first + staged)
                staged += 1
            elif published < len(sums) and self._across is not None:
                self._across.wait(sums[published], lambda: tokens.stay(doing))
            elif not heard:
                tokens.wait(doing)

    def _stage(self, chunk: Tensor, number: int) -> None:
        stages, _ = self._views(chunk.dtype)
        window = stages[self._position][number % _SLOTS]
        bounds = chunk_bounds(chunk.numel(), self._size)
        begin, end = bounds[self._position], bounds[self._position + 1]
        window[:begin].copy_(chunk[:begin])
        window[end : chunk.numel()].copy_(chunk[end:])
        self._tokens.tell(_STAGED)

    def _reduce(self, chunk: Tensor, number: int, scale: float) -> Tensor:
        """Sum the own part into its result slot, scaled unless ``across`` will do it."""
        scale = scale if self._across is None else 1.0
        stages, results = self._views(chunk.dtype)
        bounds = chunk_bounds(chunk.numel(), self._size)
        begin, end = bounds[self._position], bounds[self._position + 1]
        own = chunk[begin:end]
        sources = [window[number % _SLOTS][begin:end] for window in stages]
        sources[self._position] = own
        result = results[self._position][number % _SLOTS][: end - begin]
        if chunk.dtype in (torch.float16, torch.bfloat16):
            self._sum_in_single_precision(sources, scale, result)
        else:
            torch.add(sources[0], sources[1], out=result)
            for source in sources[2:]:
                result.add_(source)
            if scale != 1.0:
                result.mul_(scale)
        return result

    def _publish(self, chunk: Tensor, number: int) -> None:
        _, results = self._views(chunk.dtype)
        bounds = chunk_bounds(chunk.numel(), self._size)
        own = chunk[bounds[self._position] : bounds[self._position + 1]]
        own.copy_(results[self._position][number % _SLOTS][: own.numel()])
        self._tokens.tell(_REDUCED)

    def _sum_in_single_precision(self, sources: Sequence[Tensor], scale: float, result: Tensor) -> None:
        if self._scratch is None:
            capacity = self._result_bytes // 2
            self._scratch = torch.empty(capacity), torch.empty(capacity)
        total, converted = (scratch[: result.numel()] for scratch in self._scratch)
        total.copy_(sources[0])
        for source in sources[1:]:
            total.add_(converted.copy_(source))  # an add_ of mixed types takes twice as long
        result.copy_(total.mul_(scale))

    def _gather(self, chunk: Tensor, number: int) -> None:
        _, results = self._views(chunk.dtype)
        bounds = chunk_bounds(chunk.numel(), self._size)
        for owner, windows in enumerate(results):
            if owner != self._position:
                part = chunk[bounds[owner] : bounds[owner + 1]]
                part.copy_(windows[number % _SLOTS][: part.numel()])

    def _views(self, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The stage and result slots of each rank as tensors of ``dtype``."""
        if dtype not in self._slots:
            size = dtype.itemsize
            stage_starts = [slot * self._chunk_bytes for slot in range(_SLOTS)]
            results_begin = _SLOTS * self._chunk_bytes
            result_starts = [results_begin + slot * self._result_bytes for slot in range(_SLOTS)]
            self._slots[dtype] = (
                [
                    [torch.frombuffer(m, dtype=dtype, count=self._chunk_bytes // size, offset=o) for o in stage_starts]
                    for m in self._maps
                ],
                [
                    [
                        torch.frombuffer(m, dtype=dtype, count=self._result_bytes // size, offset=o)
                        for o in result_starts
                    ]
                    for m in self._maps
                ],
            )
        return self._slots[dtype]

    def _leave(self, reason: str) -> None:
        """Tell all peers why, then close, so that they fail now and not at their own timeout."""
        if self._across is not None:
            self._across.close(reason)
        self._tokens.leave(reason)

    def close(self, reason: str | None = None) -> None:
        """Leave the group; an all-reduce under way, here or on a peer, ends with an error that gives ``reason``."""
        self._closed = True
        self._leave(reason or f"rank {self._watch.rank} closed its reducer")
        with self._in_use:  # a thread that waits in all_reduce is awake now and on its way out
            self._slots.clear()
            for window in self._maps:
                window.close()
            self._maps.clear()


class _TokenMesh:
    """One-byte announcements between all pairs; every rank counts what each peer has announced since the start."""

    def __init__(self, links: dict[int, Link], watch: Watch) -> None:
        self.links = links
        self._watch = watch
        self._counts = {token: dict.fromkeys(links, 0) for token in (_STAGED, _REDUCED)}
        self._ended: dict[int, LinkClosedError] = {}
        self._last_sign = time.monotonic()
        self._sleeping = select.poll()
        for link in links.values():
            self._sleeping.register(link.socket, select.POLLIN)
        self.goal = 0

    def tell(self, token: bytes) -> None:
        for link in self.links.values():
            try:
                link.socket.send(token)
            except OSError:  # gone, or so stalled that its buffer is full of tokens: matters when its own are missing
                continue

    def least(self, token: bytes) -> int:
        """How often every peer has announced ``token``, as far as heard."""
        return min(self._counts[token].values())

    def hear(self) -> bool:
        """Take in what has arrived, without waiting; whether there was anything."""
        heard = False
        for link in self.links.values():
            if link.peer not in self._ended and (data := link.poll()) is not None:
                self._absorb(link, data)
                heard = True
        return heard

    def stay(self, doing: str) -> None:
        """Called every poll interval of a wait for other groups: this rank is alive, and are the others?"""
        self.tell(_ALIVE)
        self._last_sign = time.monotonic()
        self.hear()
        self._check(doing)

    def wait(self, doing: str) -> None:
        """Until anything arrives, asleep: polling with yields in between gives the core away for longer."""
        self._last_sign = time.monotonic()
        while not self._sleeping.poll(POLL_SECONDS * 1000):
            self._check(doing)
        self.hear()
        self._check(doing)

    def _check(self, doing: str) -> None:
        """Has anybody left, and if not, who holds the group up for how long?"""
        for peer, error in self._ended.items():
            if self._counts[_REDUCED][peer] < self.goal:  # a peer that left after its last part is no failure
                raise error
        progress = {peer: sum(counts[peer] for counts in self._counts.values()) for peer in self.links}
        last = min(progress.values())
        behind = ", ".join(str(peer) for peer in self.links if progress[peer] == last)
        self._watch.check(self._last_sign, f"rank {behind}", doing)

    def _absorb(self, link: Link, data: bytes) -> None:
        tokens, left, words = data.partition(_FAREWELL)
        if tokens:
            self._last_sign = time.monotonic()
        for token, counts in self._counts.items():
            counts[link.peer] += tokens.count(token)
        if left or not data:
            while more := link.poll():
                words += more
            with contextlib.suppress(KeyError, ValueError):  # not there any more, or closed on this side already
                self._sleeping.unregister(link.socket)
            self._ended.setdefault(link.peer, LinkClosedError(link.peer, words.decode(errors="replace") or None))

    def leave(self, reason: str) -> None:
        """Tell every peer why, then close; safe to repeat and to call while another thread waits."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.socket.send(_FAREWELL + reason.encode(), socket.MSG_DONTWAIT)
            link.close()
