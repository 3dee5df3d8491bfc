"""How a user's loader is shared out, against the order that one process would see."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_llmscale.data.ranks import RankBatchSampler, rank_loader, synchronized_loader
from lightning_llmscale.errors import DataError, UnevenDataError


def alone(tag: str, payload: bytes) -> list[bytes]:
    return [payload]


class Meeting:
    """An exchange between threads, one per rank."""

    def __init__(self, world: int) -> None:
        self.barrier, self.given = threading.Barrier(world, timeout=20), [b""] * world

    def of(self, rank: int):
        def exchange(tag: str, payload: bytes) -> list[bytes]:
            self.given[rank] = payload
            self.barrier.wait()
            answer = list(self.given)
            self.barrier.wait()
            return answer

        return exchange


def on_ranks(world: int, job) -> list[Any]:
    """`job(rank, exchange)` on a thread per rank, with the errors as values."""
    meeting, results = Meeting(world), [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = job(rank, meeting.of(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def batches_of(world: int, samples: int, size: int, drop_last: bool = False) -> list[list[list[int]]]:
    return [
        list(
            RankBatchSampler(
                BatchSampler(SequentialSampler(range(samples)), size, drop_last),
                replicas=world, replica=rank, exchange=alone,
            )
        )
        for rank in range(world)
    ]  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("samples", [1, 5, 7, 8, 12, 13, 25])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_see_the_global_batches_in_order(world: int, samples: int, size: int, drop_last: bool) -> None:
    per_rank = batches_of(world, samples, size, drop_last)
    want = list(BatchSampler(range(samples), size * world, drop_last))
    assert {len(batches) for batches in per_rank} == {len(want)}
    for index, whole in enumerate(want):
        shares = [per_rank[rank][index] for rank in range(world)]
        held = [len(whole[rank::world]) for rank in range(world)]
        seen = [i for share, n in zip(shares, held, strict=True) for i in share[:n]]
        assert sorted(seen) == whole
        assert all(share for share in shares), "a rank without samples repeats one"


def test_sizes_tell_what_every_rank_holds() -> None:
    sampler = RankBatchSampler(BatchSampler(range(9), 4, False), replicas=2, replica=1, exchange=alone)
    assert list(sampler) == [[1, 3, 5, 7], [8]]
    assert [sampler.llmscale_sizes(index) for index in range(4)] == [None, (1, 0), None, (1, 0)], "passes repeat"
    assert len(sampler) == 2


class Ragged(Sampler[list[int]]):
    """A user's batch sampler that is no BatchSampler."""

    batches = ([0, 1, 2], [3], [4, 5], [6, 7, 8], [9])

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


def test_a_custom_batch_sampler_is_dealt_out_batch_by_batch() -> None:
    def job(rank: int, exchange: Any) -> tuple[list[list[int]], list[Any]]:
        sampler = RankBatchSampler(Ragged(), replicas=2, replica=rank, exchange=exchange)
        batches = list(sampler)
        next(iter(sampler))  # somebody looks at the first batch again
        return batches, [sampler.llmscale_sizes(index) for index in range(len(batches))]

    (first, sizes), (second, same) = on_ranks(2, job)
    assert first == [[0, 1, 2], [4, 5], [9]]
    assert second == [[3], [6, 7, 8], [9]]
    assert sizes == same == [(3, 1), (2, 3), (1, 0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda data: RandomSampler(data),
        lambda data: RandomSampler(data, replacement=True, num_samples=17),
        lambda data: WeightedRandomSampler([1.0, 2.0] * 10, 20),
    ],
)
def test_random_samplers_draw_the_order_of_one_process(make: Any) -> None:
    data = range(20)
    torch.manual_seed(5)
    want = list(make(data))
    states: dict[int, torch.Tensor] = {}

    def order(rank: int) -> list[int]:
        torch.manual_seed(5 + 100 * rank)  # ranks that differ: rank 0 decides
        sampler = RankBatchSampler(
            BatchSampler(make(data), 2, False),
            replicas=1,
            replica=0,
            exchange=lambda tag, p: [states.setdefault(tag, p)],
        )
        return [i for batch in sampler for i in batch]

    assert order(0) == want
    assert order(1) == want


def test_a_sampler_that_differs_by_rank_is_named() -> None:
    class Stubborn(Sampler[int]):
        def __init__(self, order: Sequence[int]) -> None:
            self.order = order

        def __iter__(self) -> Iterator[int]:
            return iter(self.order)

        def __len__(self) -> int:
            return len(self.order)

    def job(rank: int, exchange: Any) -> list[list[int]]:
        source = BatchSampler(Stubborn([rank, 1 - rank]), 1, False)
        return list(RankBatchSampler(source, replicas=2, replica=rank, exchange=exchange))

    errors = on_ranks(2, job)
    assert all(isinstance(error, DataError) and "ranks [1]" in str(error) for error in errors)


def test_random_state_of_other_ranks_is_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    torch.manual_seed(1)
    foreign: list[bytes] = []
    source = BatchSampler(RandomSampler(range(8)), 2, False)
    list(RankBatchSampler(source, replicas=1, replica=0, exchange=lambda tag, p: [foreign.append(p) or p]))
    torch.manual_seed(2)
    before = states()
    answers = iter(foreign)
    list(RankBatchSampler(source, replicas=1, replica=0, exchange=lambda tag, p: [next(answers)]))
    assert states() == before


def test_rank_loader_keeps_any_loader_subclass() -> None:
    class Odd(DataLoader[int]):
        def __init__(self, flavour: str) -> None:
            super().__init__(list(range(10)), batch_size=3)
            self.flavour = flavour

    loader = Odd("plain")
    mine = rank_loader(loader, replicas=2, replica=0, exchange=alone)
    assert isinstance(mine, Odd)
    assert mine.flavour == "plain"
    assert [b.tolist() for b in mine] == [[0, 2, 4], [6, 8]]
    assert [b.tolist() for b in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], "the user's loader is untouched"


def test_rank_loader_without_automatic_batching() -> None:
    loader = DataLoader(list(range(5)), batch_size=None)
    shares = [list(rank_loader(loader, replicas=2, replica=r, exchange=alone)) for r in range(2)]
    assert shares == [[0, 2, 4], [1, 3, 4]]


def uneven(rank: int, exchange: Any, mode: str, sized: bool) -> list[int]:
    data = list(range(3 + 2 * rank))
    loader = synchronized_loader(data if sized else iter(data), exchange=exchange, uneven=mode, count=lambda b: 1)
    return list(loader)


@pytest.mark.parametrize("sized", [True, False])
def test_uneven_loaders_end_with_the_shortest(sized: bool) -> None:
    assert on_ranks(2, lambda r, e: uneven(r, e, "drop", sized)) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("sized", [True, False])
def test_uneven_loaders_are_an_error_on_every_rank_on_demand(sized: bool) -> None:
    errors = on_ranks(2, lambda r, e: uneven(r, e, "error", sized))
    assert all(isinstance(error, UnevenDataError) and "uneven='drop'" in str(error) for error in errors)


def test_a_synchronized_loader_shows_the_attributes_of_the_users() -> None:
    class Stateful:
        position = 4

        def __iter__(self) -> Iterator[int]:
            yield from range(2)

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

    theirs = Stateful()
    loader = synchronized_loader(theirs, exchange=alone, uneven="drop", count=lambda b: 1)
    assert loader.state_dict() == {"position": 4}
    loader.position = 7
    assert theirs.position == 7
    assert not hasattr(loader, "load_state_dict")
    with pytest.raises(TypeError):
        len(loader)  # type: ignore[arg-type]
