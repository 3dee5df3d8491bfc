from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.data.loader import Cursor, Layout, TrainLoader
from lightning_llmscale.data.mixing import MixedPlan, Stage, Stop, shares
from lightning_llmscale.data.plan import ShuffledPlan
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.sources import SampleSource
from lightning_llmscale.errors import ConfigurationError, DataError
from tests.unit.data.archives import flat, write_numbered
from tests.unit.data.test_datamodule import _Progress

SIZES = {"web": [40, 30], "code": [25], "math": [7, 6]}
WEIGHTS = {"web": 6.0, "code": 3.0, "math": 1.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    root = tmp_path_factory.mktemp("mix")
    return {name: write_numbered(root / name, counts) for name, counts in SIZES.items()}


def plan(folders: dict[str, list[str]], stage: Stage, stop: Stop = 1000) -> MixedPlan:
    plans = {name: ShuffledPlan(SampleSource(ShardReader(paths), 0), 4, 2) for name, paths in folders.items()}
    return MixedPlan(plans, stage, 0, stop)


def drawn(mixed: MixedPlan, start: int, size: int) -> list[tuple[str, int]]:
    """Dataset and sample at each position."""
    names = list(SIZES)
    rows = mixed.locate(np.arange(start, start + size))
    return [(names[row[0]], item["cls"]) for row, item in zip(rows.tolist(), mixed.read(rows), strict=True)]


def test_shares_are_rounded_by_largest_remainder() -> None:
    assert shares({"a": 1, "b": 1, "c": 1}).tolist() == [334, 333, 333]
    assert shares(WEIGHTS).tolist() == [600, 300, 100]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, "b": 0.0}, "'b' is 0.0; give a positive number"),
        ({"a": 5000.0, "b": 1.0}, "less than one item in 1000"),
    ],
)
def test_weights_without_an_item_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shares(weights)


def test_each_dataset_gets_its_share_and_repeats_only_when_read_whole(folders: dict[str, list[str]]) -> None:
    got = drawn(plan(folders, Stage(WEIGHTS)), 0, 3000)
    assert Counter(name for name, _ in got) == {"web": 1800, "code": 900, "math": 300}
    assert Counter(name for name, _ in got[:500])["web"] == pytest.approx(300, abs=40)
    for name, counts in SIZES.items():
        own = [number for dataset, number in got if dataset == name]
        whole = sum(counts)
        for epoch in range(len(own) // whole):
            assert sorted(own[epoch * whole : (epoch + 1) * whole]) == list(range(whole))


def test_any_position_is_found_without_the_others(folders: dict[str, list[str]]) -> None:
    mixed = plan(folders, Stage(WEIGHTS))
    whole = drawn(mixed, 0, 2100)
    for start in (0, 7, 999, 1000, 1999, 2050):
        assert drawn(plan(folders, Stage(WEIGHTS)), start, 30) == whole[start : start + 30]


@pytest.mark.parametrize(("stop", "check"), [("first", min), ("all", max)])
def test_a_pass_ends_when_datasets_were_read_whole(folders: dict[str, list[str]], stop: Stop, check: Any) -> None:
    mixed = plan(folders, Stage(WEIGHTS), stop)
    counts = Counter(name for name, _ in drawn(mixed, 0, mixed.items))
    before = Counter(name for name, _ in drawn(mixed, 0, mixed.items - 1))
    done = {name: counts[name] >= sum(SIZES[name]) for name in SIZES}
    done_before = {name: before[name] >= sum(SIZES[name]) for name in SIZES}
    assert (any if stop == "first" else all)(done.values())
    assert not (any if stop == "first" else all)(done_before.values())


def test_new_weights_begin_a_stage_where_the_last_one_ended(folders: dict[str, list[str]]) -> None:
    first = plan(folders, Stage(WEIGHTS))
    position = 1234
    counts = first.read_before(position)
    assert counts == dict(Counter(name for name, _ in drawn(first, 0, position)))
    weights = {"web": 1.0, "code": 1.0, "math": 8.0}
    second = plan(folders, Stage(weights, position, counts))
    got = drawn(first, 0, position) + drawn(second, position, 1000)
    assert Counter(name for name, _ in got[position:]) == {"web": 100, "code": 100, "math": 800}
    for name, sizes in SIZES.items():
        own = [number for dataset, number in got if dataset == name]
        assert sorted(own[: sum(sizes)]) == list(range(sum(sizes)))
        again = own[sum(sizes) : 2 * sum(sizes)]
        assert len(set(again)) == len(again)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_mixture(folders: dict[str, list[str]], world: int) -> None:
    def batches(rank: int, ranks: int) -> list[list[tuple[str, int]]]:
        layout = Layout(12, rank, ranks)
        loader = TrainLoader(plan(folders, Stage(WEIGHTS), 120), layout, list, "continuous", Cursor())
        return [[(sample["__url__"], sample["cls"]) for sample in batch] for batch in loader]

    parts = [batches(rank, world) for rank in range(world)]
    assert [flat(ranks) for ranks in zip(*parts, strict=True)] == batches(0, 1)


def module(folders: dict[str, list[str]], **options: Any) -> WebDatasetDataModule:
    arguments: dict[str, Any] = {"weights": WEIGHTS, "mix_stop": 240, "epoch_end": "continuous", **options}
    data = WebDatasetDataModule(train=folders, global_batch_size=12, **arguments)
    data.trainer = _Progress()  # type: ignore[assignment]
    data.setup("fit")
    return data


def numbers(batch: Any) -> list[tuple[str, int]]:
    return list(zip(batch["__url__"], batch["cls"].tolist(), strict=True))


def test_a_mixture_resumes_with_the_same_and_with_new_weights(folders: dict[str, list[str]]) -> None:
    data = module(folders)
    stream = iter(data.train_dataloader())
    read = [numbers(next(stream)) for _ in range(9)]
    state = data.state_dict()
    again = module(folders)
    again.load_state_dict(state)
    assert [numbers(b) for b in again.train_dataloader()] == [numbers(b) for b in stream]

    changed = module(folders, weights={"web": 1, "code": 1, "math": 8})
    changed.load_state_dict(state)
    rest = [numbers(batch) for batch in changed.train_dataloader()]
    assert len(rest) == 11
    assert Counter("math" in url for url, _ in flat(rest))[True] > 80
    code = [number for url, number in flat(read) + flat(rest) if "code" in url]
    assert len(set(code[:25])) == 25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"web": 1}}, "must give a weight for each dataset: web, code, math"),
        ({"epoch_end": "drop"}, "use epoch_end='continuous'"),
    ],
)
def test_wrong_options_of_a_mixture(folders: dict[str, list[str]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        module(folders, **options)


def test_weights_of_one_dataset_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="weights has no effect on one dataset"):
        WebDatasetDataModule(train="a.tar", weights={"a": 1}, global_batch_size=1)


def test_a_changed_dataset_of_a_mixture_is_named(folders: dict[str, list[str]], tmp_path: Path) -> None:
    data = module(folders)
    next(iter(data.train_dataloader()))
    other = {**folders, "code": write_numbered(tmp_path, [26])}
    with pytest.raises(DataError, match="made with: dataset code changed"):
        module(other).load_state_dict(data.state_dict())
