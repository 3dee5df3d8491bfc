"""The outer level of a two-level all-reduce: sums between groups, in a thread beside the sums inside the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.futures import Future

from lightning_llmscale.collectives.engine import CommunicationThread
from lightning_llmscale.collectives.links import POLL_SECONDS
from lightning_llmscale.collectives.protocol import Reducer

__all__ = ["Across"]


class _PulsingReducer(Reducer, Protocol):
    """A reducer that can tell its peers that this rank is alive although it does not call them just now."""

    def heartbeats(self) -> AbstractContextManager[None]: ...


class Across:
    """Reduces the part a rank owns with the owners of the same part in other groups.

    Args:
        reducer: Connects those owners; closed with this object.
    """

    def __init__(self, reducer: _PulsingReducer) -> None:
        self._reducer = reducer
        self._thread = CommunicationThread(reducer)

    def taking_part(self) -> AbstractContextManager[None]:
        """While the body runs, owners elsewhere hear that this rank may come late because it waits inside its group."""
        return self._reducer.heartbeats()

    def submit(self, part: Tensor, scale: float, stream: Hashable | None) -> Future[Tensor]:
        """Start ``part <- scale * sum over groups``."""
        return self._thread.submit(part, scale, stream)

    def wait(self, future: Future[Tensor], tick: Callable[[], None]) -> None:
        """Until ``future`` is done.

        Args:
            future: From :meth:`submit`.
            tick: Called every poll interval; raises to give up.

        Raises:
            PeerFailureError: The sum failed.
        """
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(POLL_SECONDS):
            tick()
        self.check()

    def check(self) -> None:
        """Raise the error of a sum that failed, if any has.

        Raises:
            PeerFailureError: A sum failed.
        """
        if self._thread.error is not None:
            raise self._thread.error

    def close(self, reason: str | None = None) -> None:
        """Leave the other groups, telling them ``reason``; safe to repeat."""
        self._thread.close(reason)
