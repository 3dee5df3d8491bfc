"""Loaders of simulated ranks: what a global batch holds depends neither on ranks nor on workers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llmscale.data.loader import Cursor, EvaluationLoader, Layout, TrainLoader
from lightning_llmscale.data.plan import EpochEnd, ShuffledPlan, StoredPlan, evaluation_spans
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.sources import SampleSource
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import flat, write_numbered, write_tar

COUNTS = [7, 31, 12, 1, 25, 18, 40, 9]


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["cls"] for sample in samples]


def training_loader(
    source: SampleSource, batch: int, rank: int, world: int, workers: int, start: Cursor, end: EpochEnd = "drop"
) -> TrainLoader:
    plan = ShuffledPlan(source, lanes=12, window=4)
    cursor = Cursor(start.position, start.batch)
    return TrainLoader(plan, Layout(batch, rank, world, workers), numbers, end, cursor)


def global_batches(
    source: SampleSource,
    batch: int,
    world: int,
    workers: int,
    start: Cursor,
    most: int | None = None,
    end: EpochEnd = "drop",
) -> list[list[int]]:
    ranks = [training_loader(source, batch, rank, world, workers, start, end) for rank in range(world)]
    each = [list(islice(iter(rank), most)) for rank in ranks]
    assert len({len(batches) for batches in each}) == 1
    return [flat(parts) for parts in zip(*each, strict=True)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    return SampleSource(ShardReader(write_numbered(tmp_path_factory.mktemp("shards"), COUNTS)), seed=3)


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (3, 0), (5, 0), (24, 0), (1, 2), (2, 3)])
def test_global_batches_are_the_same_in_every_world(source: SampleSource, world: int, workers: int) -> None:
    assert global_batches(source, 24, world, workers, Cursor()) == global_batches(source, 24, 1, 0, Cursor())


@pytest.mark.parametrize(
    ("before", "after", "stop"), [((2, 2), (3, 1), 4), ((4, 1), (2, 2), 1), ((1, 0), (5, 2), 3), ((3, 2), (2, 0), 5)]
)
def test_another_world_continues_where_one_stopped(
    source: SampleSource, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    whole = global_batches(source, 24, 1, 0, Cursor())
    first = global_batches(source, 24, *before, Cursor(), most=stop)
    rest = global_batches(source, 24, *after, Cursor(position=24 * stop))
    assert first + rest == whole


def test_another_batch_size_continues_without_loss(source: SampleSource) -> None:
    first = flat(global_batches(source, 24, 2, 0, Cursor(), most=2))
    second = flat(global_batches(source, 10, 1, 0, Cursor(48)))
    whole = flat(global_batches(source, 1, 1, 0, Cursor()))
    assert sorted(first + second) == sorted(whole[: 48 + 90])


@pytest.mark.parametrize("batch", [24, 25])
def test_a_batch_is_dealt_to_ranks_lane_by_lane(source: SampleSource, batch: int) -> None:
    plan = ShuffledPlan(source, lanes=12, window=4)
    for start in range(0, 2 * source.items, batch):
        whole = plan.deal(start, batch)
        assert sorted(whole.tolist()) == list(range(start, start + batch))
    lanes = plan.deal(24, 24) % 12
    assert lanes.tolist() == sorted(lanes.tolist())


def test_pad_ends_an_epoch_with_every_sample(source: SampleSource) -> None:
    for world in (1, 2, 5, 24):
        loaders = [training_loader(source, 24, rank, world, 0, Cursor(), "pad") for rank in range(world)]
        counted: list[int] = []
        for index, parts in enumerate(zip(*loaders, strict=True)):
            weights = loaders[0].rank_weights(index)
            assert all(len(part) >= max(1, weight) for part, weight in zip(parts, weights, strict=True))
            counted += flat(part[:weight] for part, weight in zip(parts, weights, strict=True))
        assert sorted(counted) == list(range(sum(COUNTS)))


def test_continuous_reads_each_sample_once_before_any_comes_again(source: SampleSource) -> None:
    loader = training_loader(source, 24, 0, 1, 0, Cursor(), "continuous")
    passes = [list(loader) for _ in range(30)]
    assert {len(batches) for batches in passes} == {143 // 24}
    stream = flat(flat(passes))
    twos = flat(global_batches(source, 24, 2, 0, Cursor(), end="continuous"))
    assert stream[: len(twos)] == twos
    # a batch that crosses epochs keeps their items apart
    for epoch in range(len(stream) // 143):
        assert sorted(stream[epoch * 143 : (epoch + 1) * 143]) == list(range(143))


@pytest.mark.parametrize("trials", [3, pytest.param(34, marks=pytest.mark.long)])
@pytest.mark.parametrize("end", ["drop", "pad", "continuous"])
def test_random_stops_and_worlds_lose_and_repeat_nothing(source: SampleSource, end: EpochEnd, trials: int) -> None:
    """Stops after a random number of batches, then goes on with random ranks and workers, over several epochs."""
    random = Random(end)
    whole = training_loader(source, 12, 0, 1, 0, Cursor(), end)
    expected = flat(list(whole) for _ in range(3))
    for trial in range(trials):
        got: list[list[int]] = []
        position, batch = 0, 0
        while len(got) < len(expected):
            world, most = random.choice([1, 2, 3, 5, 7, 12]), random.randrange(1, 14)
            workers = random.choice([1, 2]) if trial == 0 and len(got) > len(expected) - 10 else 0
            cursors = [Cursor(position, batch) for _ in range(world)]
            loaders = [
                TrainLoader(ShuffledPlan(source, 12, 4), Layout(12, rank, world, workers), numbers, end, cursors[rank])
                for rank in range(world)
            ]
            for parts in islice(zip(*loaders, strict=True), most):
                weights = loaders[0].rank_weights(cursors[0].batch - 1)
                got.append(flat(part[:weight] for part, weight in zip(parts, weights, strict=True)))
            position, batch = cursors[0].position, cursors[0].batch
            if batch == len(loaders[0]):
                position, batch = loaders[0].next_pass(), 0
        assert got[: len(expected)] == expected


def test_passes_are_epochs(source: SampleSource) -> None:
    loader = training_loader(source, 20, 0, 1, 0, Cursor())
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader) == 7
    assert first != second
    assert len(set(flat(first))) == 140


def test_rank_weights_are_the_samples_of_each_rank(source: SampleSource) -> None:
    loaders = [training_loader(source, 23, rank, 4, 0, Cursor()) for rank in range(4)]
    for index, parts in enumerate(zip(*loaders, strict=True)):
        assert loaders[0].rank_weights(index) == [len(part) for part in parts]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_the_global_random_state_alone(source: SampleSource, workers: int) -> None:
    state = torch.random.get_rng_state()
    list(training_loader(source, 20, 0, 1, workers, Cursor()))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_loader_has_a_length_and_no_state(source: SampleSource) -> None:
    loader = training_loader(source, 20, 0, 1, 0, Cursor())
    assert loader.llmscale_synchronized
    assert not hasattr(loader, "state_dict")


@given(items=st.integers(1, 300), batch=st.integers(1, 40), world=st.integers(1, 40))
@settings(max_examples=500, deadline=None)
def test_evaluation_gives_every_rank_something_of_every_batch(items: int, batch: int, world: int) -> None:
    if not world <= min(batch, items):
        return
    spans = evaluation_spans(items, batch, world)
    sizes = [size for _, size in spans]
    assert sum(sizes) == items
    assert min(sizes) >= world
    assert max(sizes) < batch + world
    assert sizes[:-2] == [batch] * len(sizes[:-2])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once_in_stored_order(source: SampleSource, workers: int) -> None:
    for world in (1, 2, 3, 7):
        ranks = [
            list(EvaluationLoader(StoredPlan(source), Layout(16, rank, world, workers), numbers))
            for rank in range(world)
        ]
        assert flat(flat(zip(*ranks, strict=True))) == list(range(sum(COUNTS)))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_arrives_as_one_sentence(tmp_path: Path, workers: int) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("b.cls", b"one")])
    loader = EvaluationLoader(
        StoredPlan(SampleSource(ShardReader([str(shard)]), 0)), Layout(1, num_workers=workers), numbers
    )
    with pytest.raises(DataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{shard}: member .cls of sample 'b' cannot be decoded (invalid literal")
    assert "\n" not in str(caught.value)
