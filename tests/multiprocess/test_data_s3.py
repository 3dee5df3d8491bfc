"""Shards behind a real S3 API: moto's server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.data.inspection import index_shards
from lightning_llmscale.data.opening import open_shards
from lightning_llmscale.data.shards import expand_shards
from lightning_llmscale.errors import DataError
from tests.unit.data.archives import flat, write_numbered

moto = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("s3fs")

# fsspec starts these threads once and keeps them for the life of a process
asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), fsspec.asyn.get_loop()).result(10)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="data")
    for path in write_numbered(tmp_path / "data", [10, 10, 10]):
        client.upload_file(path, "data", f"train/{Path(path).name}")
    try:
        yield {"endpoint_url": f"http://{host}:{port}"}
    finally:
        client.close()
        server.stop()


def test_shards_are_read_and_indexed_on_s3(tmp_path: Path, bucket: dict[str, Any]) -> None:
    shards = expand_shards("s3://data/train/{0000..0002}.tar")
    reader = open_shards(shards, cache_dir=str(tmp_path / "a"), storage_options=bucket)
    assert index_shards(reader) == 30
    data = WebDatasetDataModule(
        train="s3://data/train/{0000..0002}.tar",
        global_batch_size=10,
        cache_dir=str(tmp_path / "b"),
        storage_options=bucket,
    )
    data.setup("fit")
    assert not list((tmp_path / "b").glob("*.tar"))  # the indexes were enough
    assert sorted(flat(batch["cls"].tolist() for batch in data.train_dataloader())) == list(range(30))


def test_a_missing_object_is_named(tmp_path: Path, bucket: dict[str, Any]) -> None:
    data = WebDatasetDataModule(
        train="s3://data/train/0009.tar", global_batch_size=1, cache_dir=str(tmp_path), storage_options=bucket
    )
    with pytest.raises(DataError, match=r"0009\.tar does not exist \(404\)"):
        data.setup("fit")
