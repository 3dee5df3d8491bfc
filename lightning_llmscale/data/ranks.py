"""Give each rank its part of a user's own loader, in the order the user asked for.

Lightning injects a ``DistributedSampler`` that always shuffles in training and pads the end by repeating samples. Here
ranks together follow the order of the user's own sampler: global batch ``i`` of ``R`` ranks with batch size ``b`` holds
the samples ``i*b*R ... (i+1)*b*R - 1`` of that order, rank ``r`` takes every R-th of them, and the last global batch is
as short as the data. Each loader remembers how many samples every rank held in each batch, which the strategy turns
into weights. A rank for which nothing is left repeats one sample that weighs nothing, so all ranks run equally many
batches.
"""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from lightning_llmscale.errors import DataError, UnevenDataError

__all__ = ["RankBatchSampler", "SynchronizedLoader", "rank_loader", "synchronized_loader"]

log = logging.getLogger(__name__)

Exchange = Callable[[str, bytes], list[bytes]]
_ANSWER = struct.Struct("?q")


class RankBatchSampler(Sampler[list[Any]]):
    """One replica's index lists, taken from a sampler that describes the whole data set.

    Args:
        source: The user's batch sampler. A plain ``BatchSampler`` is regrouped into global batches of
            ``R * batch_size`` samples; of any other, ``R`` consecutive batches make one global batch.
        replicas: Number of data replicas R.
        replica: Index of this one.
        exchange: Collective over all ranks, by which they take over rank 0's random state and compare orders.
    """

    def __init__(self, source: Iterable[Any], *, replicas: int, replica: int, exchange: Exchange) -> None:
        self.source, self.replicas, self.replica, self._exchange = source, replicas, replica, exchange
        self._uneven: dict[int, tuple[int, ...]] = {}
        self.sampler: Any = source.sampler if isinstance(source, BatchSampler) else source
        self.batch_size: int | None = source.batch_size if isinstance(source, BatchSampler) else None
        self.drop_last = isinstance(source, BatchSampler) and source.drop_last
        self._regroup = type(source) is BatchSampler

    def __len__(self) -> int:
        if not self._regroup:
            return -(-len(self.source) // self.replicas)  # type: ignore[arg-type]
        samples, size = len(self.sampler), self._global_size
        return int(samples // size if self.drop_last else -(-samples // size))

    def __iter__(self) -> Iterator[list[Any]]:
        return self._regrouped() if self._regroup else self._grouped()

    def llmscale_sizes(self, index: int) -> tuple[int, ...] | None:
        """Samples of each replica in global batch `index` of a pass; None if all replicas hold the same number.

        Batches of a user's own batch sampler are known once they were drawn.
        """
        if not self._regroup:
            return self._uneven.get(index % max(1, len(self)) if hasattr(self.source, "__len__") else index)
        if not hasattr(self.sampler, "__len__") or len(self) == 0:
            return None
        whole = min(self._global_size, len(self.sampler) - index % len(self) * self._global_size)
        return _uneven_or_none(tuple(len(range(r, whole, self.replicas)) for r in range(self.replicas)))

    @property
    def _global_size(self) -> int:
        return int(self.replicas * (self.batch_size or 1))

    def _regrouped(self) -> Iterator[list[Any]]:
        order = iter(shared_order(self.sampler, self._exchange))
        while whole := list(itertools.islice(order, self._global_size)):
            if self.drop_last and len(whole) < self._global_size:
                return
            yield whole[self.replica :: self.replicas] or whole[:1]

    def _grouped(self) -> Iterator[list[Any]]:
        batches = iter(shared_order(self.source, self._exchange))
        for index in itertools.count():
            group = list(itertools.islice(batches, self.replicas))
            if not group:
                return
            _note(self._uneven, index, tuple(len(batch) for batch in group) + (0,) * (self.replicas - len(group)))
            yield list(group[self.replica] if self.replica < len(group) else group[-1][:1])


def _uneven_or_none(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    return sizes if min(sizes) != max(sizes) else None


def _note(uneven: dict[int, tuple[int, ...]], index: int, sizes: tuple[int, ...]) -> None:
    """Remember a batch that is uneven; what an earlier pass left for the same index is overwritten."""
    uneven.pop(index, None)
    if _uneven_or_none(sizes) is not None:
        uneven[index] = sizes


class _Singles:
    """A sampler of single indices seen as a batch sampler, for loaders without automatic batching."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        return ([index] for index in self.sampler)


class _Flat(Sampler[Any]):
    """The inverse: index lists of length one as single indices."""

    def __init__(self, batches: RankBatchSampler) -> None:
        self.batches = batches

    def llmscale_sizes(self, index: int) -> tuple[int, ...] | None:
        return self.batches.llmscale_sizes(index)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.batches)


def rank_loader(loader: DataLoader[Any], *, replicas: int, replica: int, exchange: Exchange) -> DataLoader[Any]:
    """A copy of `loader` that yields this replica's part of every global batch.

    The copy is shallow, so any subclass with any constructor works; the user's sampler still receives ``set_epoch``.

    Raises:
        DataError: On every rank, if the ranks' loaders draw from different numbers of samples (a collective).
    """
    _check_lengths(loader, exchange)
    clone = copy.copy(loader)
    # DataLoader forbids assigning these once its iterator may depend on them; the copy has none yet
    attributes = vars(clone)
    attributes["_iterator"] = None
    if loader.batch_sampler is None:
        singles = RankBatchSampler(_Singles(loader.sampler), replicas=replicas, replica=replica, exchange=exchange)
        attributes["sampler"] = _Flat(singles)
    else:
        attributes["batch_sampler"] = RankBatchSampler(
            loader.batch_sampler, replicas=replicas, replica=replica, exchange=exchange
        )
    return clone


def shared_order(sampler: Iterable[Any], exchange: Exchange) -> Iterable[Any]:
    """The order of `sampler` as one process would draw it: on rank 0's random state, equal on all ranks (a collective).

    Raises:
        DataError: If the sampler gives ranks different orders although they share the random state.
    """
    if isinstance(sampler, SequentialSampler) or not hasattr(sampler, "__len__"):
        return sampler  # nothing random, or endless: drawn lazily
    state = exchange("the random state of the sampler", pickle.dumps(_random_state()))[0]
    own = _random_state()
    _set_random_state(pickle.loads(state))
    # no further than one pass: at its very end RandomSampler draws once more, where one process never gets
    order = list(itertools.islice(iter(sampler), len(sampler)))  # type: ignore[arg-type]
    if state != pickle.dumps(own):
        _set_random_state(own)
    digests = exchange("the order of the samples", struct.pack("<qI", len(order), zlib.crc32(_bytes(order))))
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise DataError(
            f"{type(sampler).__name__} gives ranks {differing} another order of samples than rank 0; it must draw only "
            "from torch's, numpy's or Python's global generator, or from a generator with the same seed on all ranks"
        )
    return order


def _bytes(order: Sequence[Any]) -> bytes:
    try:
        return np.asarray(order, dtype=np.int64).tobytes()
    except (TypeError, ValueError):
        return repr(order).encode()


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    np.random.set_state(state[1])
    random.setstate(state[2])


def _check_lengths(loader: DataLoader[Any], exchange: Exchange) -> None:
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    length = _length(getattr(source, "sampler", source))
    answers = exchange("the length of a loader", struct.pack("<q", -1 if length is None else length))
    lengths = [struct.unpack("<q", answer)[0] for answer in answers]
    if len(set(lengths)) > 1:
        raise DataError(
            f"the ranks' loaders draw from {lengths} samples; each rank must hold the whole data set, which is then "
            "shared out, or set Trainer(use_distributed_sampler=False) if every rank brings its own part"
        )


class SynchronizedLoader:
    """A loader whose ranks agree, before each batch, that all of them have one.

    Attributes of the user's loader, its saved state included, are those of the wrapped object.

    Args:
        loader: The user's iterable; each rank iterates its own.
        exchange: Collective over all ranks.
        uneven: ``"drop"`` ends the epoch when the first rank runs out; ``"error"`` stops with the ranks' names.
        count: Number of samples in a batch.

    Raises:
        UnevenDataError: While iterating, on every rank, if ranks differ and `uneven` is ``"error"``.
    """

    _OWN = frozenset({"_loader", "_exchange", "_on_uneven", "_count", "_uneven", "_length"})

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        exchange: Exchange,
        uneven: Literal["drop", "error"],
        count: Callable[[Any], int],
    ) -> None:
        self._loader, self._exchange, self._on_uneven, self._count = loader, exchange, uneven, count
        self._uneven: dict[int, tuple[int, ...]] = {}

    def llmscale_sizes(self, index: int) -> tuple[int, ...] | None:
        """Samples of each rank in batch `index` of this pass; None if all ranks hold the same number."""
        return self._uneven.get(index)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        for number in itertools.count():
            batch = next(iterator, _END)
            answer = _ANSWER.pack(batch is not _END, self._count(batch) if batch is not _END else 0)
            answers = [_ANSWER.unpack(a) for a in self._exchange("the next training batch", answer)]
            if not all(has for has, _ in answers):
                self._stop(number, [rank for rank, (has, _) in enumerate(answers) if not has], len(answers))
                return
            _note(self._uneven, number, tuple(samples for _, samples in answers))
            yield batch

    def _stop(self, number: int, ended: list[int], world: int) -> None:
        if len(ended) == world:
            return
        fact = f"ranks {ended} ran out of batches after {number}, the other {world - len(ended)} still had some"
        if self._on_uneven == "error":
            raise UnevenDataError(f"{fact}; give all ranks equally many, or set uneven='drop' to end the epoch there")
        log.info("%s; the epoch ends there (uneven='drop')", fact)

    def __getattr__(self, name: str) -> Any:
        if name in SynchronizedLoader._OWN:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SynchronizedLoader._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


_END = object()


class _SizedSynchronizedLoader(SynchronizedLoader):
    """The same for loaders with a length: the shortest rank's."""

    _length: int

    def __len__(self) -> int:
        return self._length


def synchronized_loader(
    loader: Iterable[Any],
    *,
    exchange: Exchange,
    uneven: Literal["drop", "error"],
    count: Callable[[Any], int],
) -> SynchronizedLoader:
    """Wrap a training loader of unknown or unequal length (a collective).

    Raises:
        UnevenDataError: If ranks announce different lengths and `uneven` is ``"error"``.
    """
    length = _length(loader)
    answers = exchange("the length of the training loader", struct.pack("<q", -1 if length is None else length))
    lengths = [struct.unpack("<q", a)[0] for a in answers]
    if min(lengths) < 0:
        return SynchronizedLoader(loader, exchange=exchange, uneven=uneven, count=count)
    if uneven == "error" and len(set(lengths)) > 1:
        raise UnevenDataError(
            f"the training loaders of the ranks have {lengths} batches; give all ranks equally many, "
            "or set uneven='drop'"
        )
    sized = _SizedSynchronizedLoader(loader, exchange=exchange, uneven=uneven, count=count)
    sized._length = min(lengths)
    return sized


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
