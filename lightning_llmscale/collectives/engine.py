"""One thread per process that reduces gradients in the order they were handed in, while backward goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.futures import Future

from lightning_llmscale.collectives.protocol import Reducer
from lightning_llmscale.errors import PeerFailureError

__all__ = ["CommunicationThread"]


_Order = tuple[Tensor, float, Hashable | None, Future[Tensor]]


class CommunicationThread:
    """Runs the all-reduces of one process first in, first out.

    All ranks must submit equal tensors in the same order; nothing here starts from a callback, whose order could differ
    between ranks. After an error every future, pending or later, completes with its tensor as it is: DDP's autograd
    code neither hangs nor meets an exception object, and the owner raises :attr:`error` once backward has returned.

    Args:
        reducer: Used by this thread alone, and closed with it.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._queue: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._unfinished = 0
        self._closed = False
        threads = torch.get_num_threads()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="llmscale-communication", daemon=True)
        self._thread.start()
        started.wait()
        # set_num_threads() in that thread also changed the default for threads yet to start; a thread that ends at once
        # puts it back without touching the one of the caller.
        restore = threading.Thread(target=torch.set_num_threads, args=(threads,))
        restore.start()
        restore.join()

    @property
    def error(self) -> BaseException | None:
        """The first error of the reducer, or ``None``."""
        return self._error

    def submit(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> Future[Tensor]:
        """Queue ``flat <- scale * sum over ranks``.

        Args:
            flat: What :meth:`Reducer.all_reduce` accepts; not to be touched until the future completes.
            scale: Factor after the sum.
            stream: Names a tensor that comes again, see :meth:`Reducer.all_reduce`.

        Returns:
            A future that completes with ``flat`` itself.

        Raises:
            RuntimeError: The thread is closed.
        """
        future: Future[Tensor] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("This communication thread is closed; open a new one for another fit.")
            self._unfinished += 1
        self._queue.put((flat, scale, stream, future))
        return future

    def drain(self, timeout: float) -> None:
        """Wait until everything submitted has completed.

        Args:
            timeout: Seconds.

        Raises:
            PeerFailureError: Not done in time.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._unfinished:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise PeerFailureError(f"{self._unfinished} all-reduces did not complete within {timeout:g} s.")

    def _run(self, started: threading.Event) -> None:
        torch.set_num_threads(1)  # additions run beside backward: they must not take the cores it computes on
        torch.get_num_threads()  # fixes the number of this thread now; else it would be read from the default later on
        started.set()
        while (item := self._queue.get()) is not None:
            flat, scale, stream, future = item
            if self._error is None:
                try:
                    with torch.no_grad():
                        self._reducer.all_reduce(flat, scale, stream)
                except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
                    self._error = error
            future.set_result(flat)
            del item, flat, future  # a bucket freed by DDP must not live on in this frame
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def close(self, reason: str | None = None) -> None:
        """Close the reducer, which ends an all-reduce under way, and join the thread; safe to repeat.

        Args:
            reason: What peers that still wait are told, see :meth:`Reducer.close`.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._reducer.close(reason)
        self._queue.put(None)
        self._thread.join()
