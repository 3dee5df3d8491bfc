from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_llmscale.data.order import (
    EpochOrder,
    SequentialOrder,
    auto_lanes,
    derive_key,
    permute,
)

GOLDEN_SMALL = [4, 2, 6, 9, 5, 8, 1, 3, 0, 7]
GOLDEN_LARGE = [740, 650, 518, 115, 672, 831]
COUNTS = np.array([13, 0, 40, 1, 77, 5, 60, 22, 0, 31])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 64, 100, 1000, 4097])
def test_permute_is_a_bijection(n: int) -> None:
    for key in range(5):
        assert sorted(permute(np.arange(n), n, derive_key(key, n)).tolist()) == list(range(n))


def test_permute_of_mixed_domains_equals_each_alone() -> None:
    sizes = np.array([1, 3, 16, 17, 500, 500])
    keys = np.array([derive_key(i) for i in range(6)], np.uint64)
    values = np.array([0, 2, 9, 16, 0, 499])
    together = permute(values, sizes, keys)
    alone = [int(permute(values[i : i + 1], int(sizes[i]), int(keys[i]))[0]) for i in range(6)]
    assert together.tolist() == alone


def test_permute_is_fixed_for_all_time() -> None:
    """A resumed run must find the order of the run that saved, whatever versions of numpy and this package are used."""
    assert permute(np.arange(10), 10, derive_key(0, 1)).tolist() == GOLDEN_SMALL
    assert permute(np.arange(6), 1000, derive_key(7)).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("n", [3, 5, 16, 17, 40])
def test_permute_places_each_value_everywhere_equally_often(n: int) -> None:
    trials = 3000
    keys = np.repeat(np.array([derive_key(1, k) for k in range(trials)], np.uint64), n)
    table = permute(np.tile(np.arange(n), trials), n, keys).reshape(trials, n)
    expected = trials / n
    chi2 = sum(((np.bincount(table[:, i], minlength=n) - expected) ** 2 / expected).sum() for i in range(n))
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (1, 4), (6, 3), (12, 4), (30, 2), (249, 4), (10_000, 4)])
def test_each_sample_comes_exactly_once(lanes: int, window: int) -> None:
    order = EpochOrder(COUNTS, derive_key(3, 0), lanes, window)
    places, items = order.locate(np.arange(order.size))
    assert order.size == COUNTS.sum()
    assert Counter(zip(places.tolist(), items.tolist(), strict=True)) == Counter(
        (place, item) for place, count in enumerate(COUNTS.tolist()) for item in range(count)
    )


def test_any_position_is_found_without_the_others() -> None:
    order = EpochOrder(COUNTS, 9, 8, 4)
    places, items = order.locate(np.arange(order.size))
    for position in np.random.default_rng(0).permutation(order.size)[:60]:
        place, item = order.locate(np.array([position]))
        assert (place[0], item[0]) == (places[position], items[position])


def test_epochs_and_seeds_give_other_orders() -> None:
    def first(key: int) -> list[int]:
        return EpochOrder(COUNTS, key, 8, 4).locate(np.arange(100))[1].tolist()

    assert first(derive_key(0, 0)) == first(derive_key(0, 0))
    assert len({tuple(first(key)) for key in (derive_key(0, 0), derive_key(0, 1), derive_key(1, 0))}) == 3


def test_window_bounds_the_shards_that_are_open() -> None:
    counts = np.full(50, 20)
    order = EpochOrder(counts, 1, 1, 3)
    places, _ = order.locate(np.arange(order.size))
    first = {place: int(np.flatnonzero(places == place)[0]) for place in range(50)}
    last = {place: int(np.flatnonzero(places == place)[-1]) for place in range(50)}
    for position in range(order.size):
        assert sum(first[place] <= position <= last[place] for place in range(50)) <= 2 * 3


def same_shard(order: EpochOrder, batch: int, shards: int) -> float:
    """Probability that two samples of a batch come from one shard."""
    places, _ = order.locate(np.arange(order.size // batch * batch))
    counts: NDArray[np.int64] = np.array([np.bincount(row, minlength=shards) for row in places.reshape(-1, batch)])
    return float((counts * (counts - 1)).sum(axis=1).mean() / (batch * (batch - 1)))


@pytest.mark.parametrize("batch", [8, 32, 100, 97, 256, 1024])
def test_automatic_lanes_mix_nearly_as_well_as_a_full_shuffle(batch: int) -> None:
    shards, samples = 256, 512
    order = EpochOrder(np.full(shards, samples), derive_key(1, 0), auto_lanes(batch), 4)
    ideal = (samples - 1) / (shards * samples - 1)
    assert same_shard(order, batch, shards) <= 1.5 * ideal


def test_256_samples_on_8_ranks_keep_32_shards_open() -> None:
    assert auto_lanes(256) * 4 // 8 == 32


def test_sequential_order_is_the_stored_one() -> None:
    order = SequentialOrder(np.array([2, 0, 3]))
    places, items = order.locate(np.arange(5))
    assert places.tolist() == [0, 0, 2, 2, 2]
    assert items.tolist() == [0, 1, 0, 1, 2]
