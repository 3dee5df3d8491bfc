from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.errors import ConfigurationError, DataError
from tests.unit.data.archives import flat, random_texts, write_numbered, write_tar, write_texts


def ready(train: Any, **options: Any) -> WebDatasetDataModule:
    data = WebDatasetDataModule(train=train, **{"global_batch_size": 4, **options})
    data.setup("fit")
    return data


def test_text_batches_are_inputs_and_shifted_labels(tmp_path: Path) -> None:
    data = ready(write_texts(tmp_path, random_texts(0, 4)), seq_len=32)
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader)
    for batch in batches:
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 32)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
        assert batch["input_ids"].max() < data.vocab_size == 257


def test_samples_are_webdatasets_dicts(tmp_path: Path) -> None:
    batch = next(iter(ready(write_numbered(tmp_path, [5, 5])).train_dataloader()))
    assert set(batch) == {"__key__", "__url__", "cls", "json"}
    assert batch["__key__"] == [f"{n:06d}" for n in batch["cls"].tolist()]
    assert batch["json"]["shard"].tolist() == [n // 5 for n in batch["cls"].tolist()]


def test_validation_is_optional_and_in_stored_order(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [5, 5])
    assert ready(shards).val_dataloader() == []
    data = WebDatasetDataModule(val=shards, test=shards[:1], global_batch_size=4)
    for stage, name, count in [("validate", "val", 10), ("test", "test", 5)]:
        data.setup(stage)
        batches = list(getattr(data, f"{name}_dataloader")())
        assert flat(b["cls"].tolist() for b in batches) == list(range(count))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"global_batch_size": 0}, ConfigurationError, "global_batch_size=0 is not possible; use .* at least 1"),
        ({"seq_len": 0}, ConfigurationError, "seq_len=0 is not possible"),
        ({"num_workers": -1}, ConfigurationError, "num_workers=-1 is not possible"),
        ({"lanes": "many"}, ConfigurationError, "lanes='many' is not possible; use 'auto' or a number"),
        ({"global_batch_size": 11}, DataError, "train holds 10 samples, fewer than global_batch_size=11"),
        ({"seq_len": 3}, DataError, r"sample '000000' has no member \.txt"),
        ({"train": None}, ConfigurationError, "no train data"),
        ({"train": "nowhere/*.tar"}, DataError, r"No shard at 'nowhere/\*\.tar'"),
    ],
)
def test_wrong_options_are_one_sentence(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    shards = write_numbered(tmp_path, [5, 5])
    with pytest.raises(error, match=message) as caught:
        ready(**{"train": shards, **options})
    assert "\n" not in str(caught.value)


def test_a_sequence_longer_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="seq_len=4096 is longer than the data"):
        ready(write_texts(tmp_path, [[b"short"]]), seq_len=4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is an empty file"),
        (b"no tar" * 200, "is not a tar archive"),
        (None, "is truncated"),
    ],
)
def test_a_bad_shard_is_found_at_setup(tmp_path: Path, content: bytes | None, message: str) -> None:
    shards = write_numbered(tmp_path, [5, 5])
    bad = Path(shards[1])
    bad.write_bytes(bad.read_bytes()[:5000] if content is None else content)
    with pytest.raises(DataError, match=f"0001.tar {message}"):
        ready(shards)


def test_samples_that_cannot_be_stacked_ask_for_collate(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.cls", b"2")])
    with pytest.raises(DataError, match=r"cannot be stacked .*give the DataModule a collate function"):
        list(ready([str(shard)], global_batch_size=2).train_dataloader())


class _Progress:
    """What the DataModule asks of a trainer, after some batches."""

    strategy = None
    callbacks: list[Any]
    accumulate_grad_batches = 1
    num_training_batches = 1000

    def __init__(self) -> None:
        self.callbacks = []
        self.fit_loop = self.epoch_loop = self.batch_progress = self.current = self
        self.ready = self.processed = 0


def saved(train: list[str], **options: Any) -> dict[str, Any]:
    data = WebDatasetDataModule(train=train, **{"global_batch_size": 4, **options})
    data.trainer = _Progress()  # type: ignore[assignment]
    data.setup("fit")
    next(iter(data.train_dataloader()))
    return data.state_dict()


def test_the_state_is_small_and_plain(tmp_path: Path) -> None:
    state = saved(write_texts(tmp_path, random_texts(0, 4)), seq_len=8)
    assert state["position"] == 4
    assert len(json.dumps(state)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed was 0, now 2"),
        ({"lanes": 3}, "lanes was 4, now 3"),
        ({"window": 2}, "window was 4, now 2"),
        ({"seq_len": 9}, "seq_len was 8, now 9"),
        ({"train": 3}, "shards was 4, now 3; samples was 87, now 64"),
        ({"train": slice(None, None, -1)}, "shards were renamed or are listed in another order"),
    ],
)
def test_other_data_is_refused_with_what_changed(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shards = write_texts(tmp_path, random_texts(0, 4))
    state = saved(shards, seq_len=8)
    options: dict[str, Any] = {"seq_len": 8, **change}
    if "train" in change:
        part = change["train"]
        options["train"] = shards[part] if isinstance(part, slice) else shards[:part]
    with pytest.raises(DataError, match=f"not what this checkpoint was made with: .*{message}"):
        ready(**{"train": shards, **options}).load_state_dict(state)


def test_changed_text_is_refused(tmp_path: Path) -> None:
    texts = random_texts(0, 4)
    state = saved(write_texts(tmp_path, texts), seq_len=8)
    texts[2][0] = texts[2][0][1:]
    with pytest.raises(DataError, match="made with: tokens was 8054, now 8053"):
        ready(write_texts(tmp_path, texts), seq_len=8).load_state_dict(state)


def test_text_moved_between_shards_is_refused(tmp_path: Path) -> None:
    texts = [[b"abc"], [b"de"], [b"f"]]
    state = saved(write_texts(tmp_path, texts), seq_len=2, global_batch_size=1)
    shards = write_texts(tmp_path, [[b"ab"], [b"cde"], [b"f"]])
    with pytest.raises(DataError, match="made with: documents changed their lengths"):
        ready(shards, seq_len=2, global_batch_size=1).load_state_dict(state)


def test_a_moved_dataset_is_the_same(tmp_path: Path) -> None:
    state = saved(write_numbered(tmp_path / "here", [9, 9]))
    ready(write_numbered(tmp_path / "there", [9, 9])).load_state_dict(state)


def test_another_batch_size_keeps_the_lanes_of_auto(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [30, 30])
    state = saved(shards, global_batch_size=4)
    data = ready(shards, global_batch_size=6)
    data.load_state_dict(state)
    first = next(iter(ready(shards, global_batch_size=4).train_dataloader()))["cls"].tolist()
    rest = [n for batch in data.train_dataloader() for n in batch["cls"].tolist()]
    assert len(rest) == 54
    assert len({*first, *rest}) == 58


def test_a_batch_smaller_than_the_replicas_is_refused_before_any_starts() -> None:
    module = WebDatasetDataModule(train="shards/{0..3}.tar", global_batch_size=3)
    module.check_replicas(3)
    with pytest.raises(ConfigurationError, match="global_batch_size=3 is smaller than the number of ranks, 4"):
        module.check_replicas(4)
