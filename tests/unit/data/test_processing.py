from __future__ import annotations

import gzip
import io
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.data.decoding import Decoder, npy_layout
from lightning_llmscale.data.index import ShardIndex
from lightning_llmscale.data.reader import OpenShard
from lightning_llmscale.data.tar import Member
from lightning_llmscale.errors import ConfigurationError, DataError, LlmscaleError
from tests.unit.data.archives import flat, write_numbered, write_tar


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def decode(members: dict[str, bytes], trusted: bool = False) -> dict[str, Any]:
    buffer, found = b"", []
    for name, raw in members.items():
        found.append(Member(f"k.{name}", len(buffer), len(raw)))
        buffer += raw
    index = ShardIndex.from_members(found, len(buffer), "a.tar")
    return Decoder(trusted)(OpenShard("a.tar", index, memoryview(buffer), None), 0)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(3.5),
        np.zeros((0, 3), np.int8),
        np.array([1, 2], ">i4"),
        np.array([True, False]),
    ],
)
def test_arrays_are_those_of_numpy(array: np.ndarray[Any, Any]) -> None:
    decoded = decode({"x.npy": npy(array)})["x.npy"]
    assert decoded.dtype == array.dtype
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, array)


def test_the_table_agrees_with_webdataset(tmp_path: Path) -> None:
    members = {
        "txt": "h\u00e9".encode(),
        "json": json.dumps({"a": [1]}).encode(),
        "cls": b"7",
        "seg.npy": npy(np.arange(3)),
        "bin": b"\x00\x01",
        "other": b"raw",
        "txt.gz": gzip.compress(b"packed"),
    }
    path = write_tar(tmp_path / "a.tar", [(f"k.{name}", raw) for name, raw in members.items()])
    (theirs,) = wds.WebDataset(str(path), shardshuffle=False).decode()
    ours = decode(members)
    assert set(ours) == {key for key in theirs if key != "__local_path__"}
    for name in members:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_npz_and_images(tmp_path: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3), b=np.eye(2))
    arrays = decode({"npz": buffer.getvalue()})["npz"]
    assert set(arrays) == {"a", "b"}
    pixels = np.random.default_rng(0).integers(0, 255, (4, 6, 3)).astype(np.uint8)
    for kind in ("png", "webp"):
        picture = io.BytesIO()
        Image.fromarray(pixels).save(picture, kind, lossless=True)
        image = decode({kind: picture.getvalue()})[kind]
        assert image.dtype == torch.uint8
        assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("trapped"),))


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("txt", b"\xff", r"member \.txt of sample 'k' cannot be decoded"),
        ("json", b"{", "cannot be decoded"),
        ("npy", b"\x93NUMPY", "cannot be decoded"),
        ("npy", npy(np.arange(9))[:-3], "cannot be decoded"),
        ("npy", pickle.dumps(1), "not an npy file"),
        ("jpg", b"no picture", "cannot be decoded"),
        ("npz", b"PK no zip", "cannot be decoded"),
        ("txt.gz", gzip.compress(b"x" * 99)[:-9], "its gzip is cut"),
        ("pyd", pickle.dumps(Trap()), "can run any code; give trusted=True"),
    ],
)
def test_undecodable_members_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, raw: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        decode({name: raw})
    assert not Path("trapped").exists()


def test_object_arrays_are_never_unpickled() -> None:
    raw = io.BytesIO()
    np.save(raw, np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(ValueError, match="unpickled"):
        npy_layout(memoryview(raw.getvalue()))


def test_a_trusted_pickle_is_loaded() -> None:
    assert decode({"pyd": pickle.dumps({"a": 1})}, trusted=True)["pyd"] == {"a": 1}


def test_a_compressed_member_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_llmscale.data.decoding._LARGEST", 1000)
    with pytest.raises(DataError, match="unpack to more than 1000 bytes"):
        decode({"txt.gz": gzip.compress(bytes(5000))})


def epoch(shards: list[str], batch: int = 4, **options: Any) -> list[Any]:
    data = WebDatasetDataModule(train=shards, global_batch_size=batch, **options)
    data.setup("fit")
    return list(data.train_dataloader())


def test_a_filter_keeps_batch_sizes_by_replacement(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [10, 10, 10])
    batches = [batch["cls"].tolist() for batch in epoch(shards, filter=lambda s: s["cls"] % 2 == 0)]
    assert [len(batch) for batch in batches] == [4] * 7
    assert all(number % 2 == 0 for number in flat(batches))
    plain = [batch["cls"].tolist() for batch in epoch(shards)]
    for kept, drawn in zip(flat(batches), flat(plain), strict=True):
        assert kept == drawn if drawn % 2 == 0 else kept // 10 == drawn // 10  # another one of the same shard
    assert batches == [batch["cls"].tolist() for batch in epoch(shards, filter=lambda s: s["cls"] % 2 == 0)]


def test_a_filter_that_rejects_everything_ends(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="100 samples in a row were rejected"):
        epoch(write_numbered(tmp_path, [10]), filter=lambda s: False)


def test_validation_leaves_rejected_samples_out(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [10])
    data = WebDatasetDataModule(val=shards, global_batch_size=4, filter=lambda s: s["cls"] % 2 == 0)
    data.setup("validate")
    assert flat(b["cls"].tolist() for b in data.val_dataloader()) == [0, 2, 4, 6, 8]
    data = WebDatasetDataModule(val=shards, global_batch_size=4, filter=lambda s: s["cls"] > 5)
    data.setup("validate")
    with pytest.raises(DataError, match="All 4 samples of a rank's evaluation batch were rejected"):
        list(data.val_dataloader())


def test_only_the_wanted_members_are_read(tmp_path: Path) -> None:
    assert set(epoch(bad_shards(tmp_path), batch=1, members=["json"])[0]) == {"__key__", "__url__"}
    assert set(epoch(write_numbered(tmp_path, [8]), members=["json"])[0]) == {"__key__", "__url__", "json"}


def test_transform_makes_the_item(tmp_path: Path) -> None:
    batches = epoch(write_numbered(tmp_path, [8]), transform=lambda s: (s["cls"], s["json"]["shard"]))
    assert sorted(flat(numbers.tolist() for numbers, _ in batches)) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_webdatasets_own_filters_plug_in(tmp_path: Path, workers: int) -> None:
    stages = [wds.decode(), wds.select(lambda s: s["cls"] != 3), wds.rename(label="cls"), wds.to_tuple("label", "json")]
    shards = write_numbered(tmp_path, [8])
    batches = epoch(shards, pipeline=stages, num_workers=workers)
    labels = flat(labels.tolist() for labels, _ in batches)
    assert len(labels) == 8
    assert set(labels) == set(range(8)) - {3}


def test_a_stage_that_makes_several_samples_is_refused(tmp_path: Path) -> None:
    def twice(stream: Any) -> Any:
        for sample in stream:
            yield from (sample, sample)

    with pytest.raises(ConfigurationError, match="pipeline made 2 samples of '00000"):
        epoch(write_numbered(tmp_path, [8]), pipeline=[twice])


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": [wds.decode()], "transform": len},
        {"seq_len": 4, "filter": len},
        {"tokenizer": "uint16"},
        {"document_ids": True},
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"no effect|takes the place"):
        WebDatasetDataModule(train="a.tar", global_batch_size=1, **options)


def bad_shards(folder: Path) -> list[str]:
    members = [(f"{n:02d}.cls", b"bad" if n in (3, 7) else str(n).encode()) for n in range(12)]
    return [str(write_tar(folder / "a.tar", members))]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    with caplog.at_level(logging.WARNING):
        batches = epoch(bad_shards(tmp_path), on_bad="skip", num_workers=workers)
    assert [len(batch["cls"]) for batch in batches] == [4, 4, 4]
    assert "skipped" in caplog.text
    assert "a.tar: member .cls of sample '03' cannot be decoded" in caplog.text
    with pytest.raises(DataError, match=r"sample '0[37]' cannot be decoded"):
        epoch(bad_shards(tmp_path))
    with pytest.raises(
        LlmscaleError, match=r"\d bad samples were met on this rank and max_bad=0; .* The first: .*a\.tar"
    ):
        epoch(bad_shards(tmp_path), on_bad="skip", max_bad=0, num_workers=workers)


def test_a_cut_shard_is_read_as_far_as_it_goes_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = write_numbered(tmp_path, [8, 8, 8])
    cut = Path(shards[1])
    cut.write_bytes(cut.read_bytes()[: 5 * 2 * 1024 + 100])
    Path(shards[2]).write_bytes(b"<html>")
    with caplog.at_level(logging.WARNING):
        batches = epoch(shards, batch=13, on_bad="skip")
    assert sorted(batches[0]["cls"].tolist()) == list(range(13))
    assert "2 damaged shards are read in part" in caplog.text
    assert "0001.tar is truncated" in caplog.text
