"""Loaders of simulated ranks: what a global batch holds depends neither on ranks nor on workers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llmscale.data.loader import BatchLoader, Cursor, Layout, evaluation_sizes
from lightning_llmscale.data.sources import SampleSource
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import flat, write_numbered, write_tar

COUNTS = [7, 31, 12, 1, 25, 18, 40, 9]


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["cls"] for sample in samples]


def training_loader(
    source: SampleSource, batch: int, rank: int, world: int, workers: int, start: Cursor
) -> BatchLoader:
    layout = Layout(batch, rank, world, workers, lanes=12)
    cursor = Cursor(start.epoch, start.position, start.position // batch)
    return BatchLoader(source, layout, [batch] * (source.items // batch), cursor, numbers)


def global_batches(
    source: SampleSource, batch: int, world: int, workers: int, start: Cursor, most: int | None = None
) -> list[list[int]]:
    ranks = [training_loader(source, batch, rank, world, workers, start) for rank in range(world)]
    each = [list(islice(iter(rank), most)) for rank in ranks]
    assert len({len(batches) for batches in each}) == 1
    return [flat(parts) for parts in zip(*each, strict=True)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    return SampleSource([Path(p) for p in write_numbered(tmp_path_factory.mktemp("shards"), COUNTS)], seed=3)


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
    second = flat(BatchLoader(source, Layout(10, lanes=12), [10] * 9, Cursor(position=48), numbers))
    whole = flat(BatchLoader(source, Layout(1, lanes=12), [1] * source.items, Cursor(), numbers))
    assert sorted(first + second) == sorted(whole[: 48 + 90])


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


def test_a_loader_has_a_length_and_no_state(source: SampleSource) -> None:
    loader = training_loader(source, 20, 0, 1, 0, Cursor())
    assert loader.llmscale_synchronized
    assert not hasattr(loader, "state_dict")


@given(items=st.integers(1, 300), batch=st.integers(1, 40), world=st.integers(1, 40))
@settings(max_examples=500, deadline=None)
def test_evaluation_gives_every_rank_something_of_every_batch(items: int, batch: int, world: int) -> None:
    if not world <= min(batch, items):
        return
    sizes = evaluation_sizes(items, batch, world)
    assert sum(sizes) == items
    assert min(sizes) >= world
    assert max(sizes) < batch + world
    assert sizes[:-2] == [batch] * len(sizes[:-2])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once_in_stored_order(source: SampleSource, workers: int) -> None:
    for world in (1, 2, 3, 7):
        sizes = evaluation_sizes(source.items, 16, world)
        ranks = [list(BatchLoader(source, Layout(16, r, world, workers), sizes, None, numbers)) for r in range(world)]
        assert flat(flat(zip(*ranks, strict=True))) == list(range(sum(COUNTS)))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_arrives_as_one_sentence(tmp_path: Path, workers: int) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("b.cls", b"one")])
    loader = BatchLoader(SampleSource([shard], 0), Layout(1, num_workers=workers), [1, 1], None)
    with pytest.raises(DataError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{shard}: member .cls of sample 'b' cannot be decoded (invalid literal")
    assert "\n" not in str(caught.value)
