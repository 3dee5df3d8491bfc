"""How ranks agree, and how they learn that another one failed.

`AgreeingStrategy` replaces the collectives that Lightning calls with self-describing ones over the control plane, so
that ranks which took different ways through a program get an error in words. A rank whose main thread is stuck inside
torch when a peer fails is ended, because no error can reach it there.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from typing_extensions import override

from lightning_llmscale import _compat
from lightning_llmscale.collectives.control import ControlPlane
from lightning_llmscale.errors import ConfigurationError, PeerFailureError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["AgreeingStrategy"]

_SMALL = 4096  # elements; larger tensors are reduced by torch.distributed once all ranks have agreed to do so
_BROKEN_PIPE = re.compile(r"closed by peer|reset by peer|broken pipe|timed out|Connection refused", re.IGNORECASE)
_MEETING = 600.0  # seconds within which all ranks must have come to the rendezvous
_PATIENCE = 2.0  # seconds after a peer's failure until torch's own connections are cut
_LAST_RESORT = 20.0  # seconds after which a main thread that is still inside torch is given up, and its process with it


class AgreeingStrategy(_Base):
    """Mixin: collectives that name themselves, failures that name the rank.

    Args:
        peer_timeout: Seconds of silence after which another rank counts as stopped or unplugged.
        **kwargs: Arguments of the Lightning strategy behind.
    """

    def __init__(self, *, peer_timeout: float, **kwargs: Any) -> None:
        if peer_timeout <= 0:
            raise ConfigurationError(f"peer_timeout={peer_timeout} is no time; give seconds > 0, for example 30")
        super().__init__(**kwargs)
        self.peer_timeout = peer_timeout
        self._control: ControlPlane | None = None
        self._step_share: float | None = None
        self._excused = False
        self._torch_sockets: set[tuple[int, int]] = set()

    @property
    def control(self) -> ControlPlane:
        """The plane on which ranks agree; opened by `setup_environment`."""
        if self._control is None:
            raise ConfigurationError(f"{type(self).__name__} is not set up yet; it is used through a Trainer")
        return self._control

    @override
    def setup_environment(self) -> None:
        sockets = _sockets()
        # Lightning seeds ranks anew here; the random numbers of a run are those of the script, as in one process
        state = torch.get_rng_state(), np.random.get_state(), random.getstate()
        with self._meeting():
            super().setup_environment()
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        self._torch_sockets |= _sockets() - sockets
        if self._control is None or self._control.failure() is not None:
            self._open_control()

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """While ranks meet: end this one if the others do not come, or if the process that started it has gone."""
        met, parent = threading.Event(), os.getppid()
        started_by_us = isinstance(self.cluster_environment, LightningEnvironment) and self.local_rank > 0
        deadline = time.monotonic() + _MEETING

        def watch() -> None:
            while not met.wait(0.5):
                if started_by_us and os.getppid() != parent:
                    os._exit(1)  # nobody is left to whom this could be told
                if time.monotonic() > deadline:
                    print(
                        f"rank {self.global_rank} ends: not all {self.world_size} ranks met within {_MEETING:g} s "
                        "at MASTER_ADDR and MASTER_PORT; start all of them, or unset RANK and WORLD_SIZE",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)

        watcher = threading.Thread(target=watch, name="llmscale-meeting", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            met.set()
            watcher.join()

    def _open_control(self) -> None:
        global _open_plane
        if _open_plane is not None:
            _open_plane.close()
        address = self.cluster_environment.main_address if self.cluster_environment is not None else "127.0.0.1"
        self._excused = False
        self._control = _open_plane = ControlPlane(
            _compat.default_store(),
            rank=self.global_rank,
            world_size=self.world_size,
            address=address,
            peer_timeout=self.peer_timeout,
            on_failure=self._on_peer_failure,
        )

    # ---- agreement between ranks -----------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; a rank that is elsewhere ends the wait with an error that names it."""
        if self._control is not None:
            self._exchange(f"the barrier {name!r}" if name else "a barrier")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that rank `src` gave."""
        if self._control is None or self.world_size == 1:
            return obj
        payload = pickle.dumps(obj) if self.global_rank == src else b""
        answer = self._exchange(f"a broadcast from rank {src}", payload)[src]
        return obj if self.global_rank == src else pickle.loads(answer)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", *, what: str = "a reduction"
    ) -> Any:
        """Reduce a tensor over all ranks, in rank order, so that every rank gets the same bits.

        Within a step, ``mean`` weighs ranks by the number of samples they hold in the batch.

        Args:
            tensor: Any shape; anything but a tensor is returned as it is.
            group: A process group other than the world: left to torch.
            reduce_op: "mean" or "avg", "sum", "min", "max", "product", or a torch ``ReduceOp``.
            what: Name of the value for error messages.
        """
        if self._control is None or not isinstance(tensor, Tensor):
            return tensor
        if group is not None and group is not torch.distributed.group.WORLD:
            return super().reduce(tensor, group, reduce_op)
        op = str(reduce_op).rsplit(".", 1)[-1].lower()
        if op in ("mean", "avg") and self._step_share is not None and self._step_share != 1.0:
            tensor = tensor * self._step_share if self._step_share else torch.zeros_like(tensor)
        if self.world_size == 1 or tensor.numel() == 0:
            return tensor
        if tensor.numel() > _SMALL:
            self._exchange(f"{what} ({op} of {tuple(tensor.shape)} {tensor.dtype})")
            return super().reduce(tensor, None, reduce_op)
        local = tensor.detach().cpu().contiguous()
        answers = self._exchange(f"{what} ({op} of {tuple(local.shape)} {local.dtype})", _to_bytes(local))
        return _combine([_from_bytes(a, local) for a in answers], op).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of the same shape from all ranks.

        Raises:
            ConfigurationError: On every rank, if shapes or types differ.
        """
        if self._control is not None and self.world_size > 1 and group is None:
            mine = f"{tuple(tensor.shape)} {tensor.dtype}"
            shapes = [a.decode() for a in self._exchange("an all_gather", mine.encode())]
            if len(set(shapes)) > 1:
                raise ConfigurationError(
                    f"all_gather got different tensors from the ranks: {dict(enumerate(shapes))}; pad them to one shape"
                )
        with self._watched("an all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def _exchange(self, tag: str, payload: bytes = b"") -> list[bytes]:
        try:
            return self.control.exchange(tag, payload)
        except PeerFailureError:
            self._excused = True
            raise

    # ---- failures --------------------------------------------------------------------------------------------

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Turn torch's "connection closed by peer" into the name of the peer."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerFailureError):
                self._excused = True
                raise
            if self._control is not None and _BROKEN_PIPE.search(str(error)):
                sentence = self._control.wait_for_failure(2.0)
                if sentence is not None:
                    self._excused = True
                    raise PeerFailureError(sentence) from error
            raise

    def _guard_signal_check(self, check: Callable[[], None]) -> None:
        with self._watched("Lightning's signal check before a batch"):
            check()

    def _guard_buffer_broadcast(self, broadcast: Callable[[], None]) -> None:
        with self._watched("the broadcast of buffers"):
            broadcast()

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Mark a torch collective of the main thread, in which a failed peer would leave it waiting."""
        with nullcontext() if self._control is None else self._control.region(what):
            yield

    def _on_peer_failure(self, sentence: str) -> None:
        """On the control thread: end this process if the main thread is stuck where no error can reach it."""
        self._excused = False
        threading.Thread(target=self._end_if_stuck, args=(sentence,), name="llmscale-rescue", daemon=True).start()

    def _end_if_stuck(self, sentence: str) -> None:
        """Wake a main thread that waits inside torch for the failed peer; end the process if even that fails."""
        control, start, cut = self.control, time.monotonic(), False
        while not self._excused and not control.closed:
            time.sleep(0.2)
            waited = time.monotonic() - start
            if waited > _PATIENCE and not cut:
                _shut_down(self._torch_sockets)
                cut = True
            if waited > _LAST_RESORT and control.current_region() is not None:
                print(f"rank {self.global_rank} ends: {sentence}", file=sys.stderr, flush=True)
                os._exit(1)


_open_plane: ControlPlane | None = None
"""The process's open control plane: one strategy is active at a time, its predecessor says goodbye."""


def _sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each open socket of this process; empty where the system does not tell."""
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            status = entry.stat()
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(entry.name), status.st_ino))
    return found


def _shut_down(sockets: set[tuple[int, int]]) -> None:
    """End both directions of those `sockets` that are still open, so that whoever waits in them gets an error."""
    for descriptor, _ in sockets & _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # torch aborts when a listener fails
                connection.shutdown(socket.SHUT_RDWR)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).reshape(like.shape)


def _combine(parts: list[Tensor], op: str) -> Tensor:
    """Reduce in rank order. A mean of integers is a float: Lightning's own truncates, which falsifies epoch means."""
    stacked = torch.stack(parts)
    if op in ("mean", "avg"):
        exact = stacked if stacked.is_floating_point() else stacked.double()
        return (exact.sum(0) / len(parts)).to(
            stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype()
        )
    if op == "sum":
        return stacked.sum(0).to(stacked.dtype)
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    if op == "product":
        return stacked.prod(0).to(stacked.dtype)
    raise ConfigurationError(f"reduce_op={op!r} is unknown; use mean, sum, min, max or product")
