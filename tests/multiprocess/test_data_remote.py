"""Remote shards through the node cache, over a network that fails."""

from __future__ import annotations

import gzip
import os
import signal
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import fsspec.asyn
import pytest

from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.data import remote as remote_module
from lightning_llmscale.data.cache import CacheWriter, ShardCache
from lightning_llmscale.data.index import index_path, save_index
from lightning_llmscale.data.reader import ShardReader, open_index
from lightning_llmscale.data.remote import Fetcher
from lightning_llmscale.errors import DataError
from tests.support.pool import RankPool
from tests.unit.data.archives import flat, write_numbered
from tests.unit.data.server import FaultyServer, faulty_server

COUNTS = [10] * 12

fsspec.asyn.get_loop()  # its thread stays for the life of a process


@pytest.fixture
def served(tmp_path: Path) -> Any:
    write_numbered(tmp_path / "data", COUNTS)
    with faulty_server(tmp_path / "data") as server:
        yield server


def read(server: FaultyServer, cache: Path, **options: Any) -> list[int]:
    data = WebDatasetDataModule(
        train=f"{server.url}/{{0000..0011}}.tar",
        cache_dir=str(cache),
        **{"global_batch_size": 10, "lanes": 2, **options},
    )
    data.setup("fit")
    return flat(batch["cls"].tolist() for batch in data.train_dataloader())


def cached_bytes(cache: Path) -> int:
    total = 0
    for path in cache.iterdir():
        if path.suffix in (".tar", ".part"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


@pytest.mark.parametrize("workers", [0, 2])
def test_remote_shards_are_read_as_local_ones(tmp_path: Path, served: FaultyServer, workers: int) -> None:
    local = WebDatasetDataModule(train=str(tmp_path / "data"), global_batch_size=10, lanes=2)
    local.setup("fit")
    expected = flat(batch["cls"].tolist() for batch in local.train_dataloader())
    assert read(served, tmp_path / "cache", num_workers=workers) == expected
    assert {served.gets[f"/{n:04d}.tar"] for n in range(12)} == {1}
    assert read(served, tmp_path / "cache") == expected
    assert {served.gets[f"/{n:04d}.tar"] for n in range(12)} == {1}


def test_an_index_beside_a_remote_shard_spares_fetching_it_at_setup(tmp_path: Path, served: FaultyServer) -> None:
    for number in range(12):
        path = tmp_path / "data" / f"{number:04d}.tar"
        save_index(open_index(path), index_path(path))
    data = WebDatasetDataModule(
        train=f"{served.url}/{{0000..0011}}.tar", global_batch_size=10, cache_dir=str(tmp_path / "cache")
    )
    data.setup("fit")
    assert {served.gets[f"/{n:04d}.tar"] for n in range(12)} == {0}
    assert len(flat(batch["cls"].tolist() for batch in data.train_dataloader())) == 120


class Deadly(Fetcher):
    """Dies while it writes a shard."""

    def fetch(self, url: str, writer: CacheWriter) -> None:
        writer.expect(20_000)
        writer.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def read_at_random(url: str, cache: Path, reads: int) -> int:
    """Reads samples in any order through a cache for five shards; rank 3 is killed in its first transfer."""
    rank = int(os.environ["RANK"])
    remote_module._FIRST_WAIT = 0.005
    fetcher = Deadly() if rank == 3 else Fetcher(tries=40)
    limit, random = 5 * 20_480, Random(rank)
    shared = ShardCache(cache, limit)
    reader = ShardReader([f"{url}/{n:04d}.tar" for n in range(12)], shared, fetcher, open_shards=1)
    for _ in range(reads):
        shard, number = random.randrange(12), random.randrange(10)
        assert bytes(reader.opened(shard).members(number)["cls"]) == str(shard * 10 + number).encode()
        with shared._locked(cache / "space.lock"):
            assert cached_bytes(cache) <= limit
    return reads


@pytest.mark.parametrize("reads", [10, pytest.param(60, marks=pytest.mark.long)])
def test_no_wrong_read_under_failures_and_a_killed_process(
    tmp_path: Path, served: FaultyServer, pool4: RankPool, reads: int
) -> None:
    """30 % of requests fail or are cut, four processes share a small cache, and one is killed while it fetches."""
    served.errors, served.cuts = 0.1, 0.2
    cache = tmp_path / "cache"
    outcomes = pool4.outcomes(read_at_random, served.url, cache, reads)
    assert outcomes[3].exit_code == -signal.SIGKILL
    assert [(outcome.value, outcome.error) for outcome in outcomes[:3]] == [(reads, None)] * 3
    assert not list(cache.glob("*.part"))  # removed by the next that needed room
    assert cached_bytes(cache) <= 5 * 20_480


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda server: (server.folder / "0003.tar").unlink(), r"0003\.tar does not exist \(404\)"),
        (lambda server: setattr(server, "forbidden", True), r"may not be read \(403\); check credentials"),
        (lambda server: setattr(server, "errors", 1.0), r"could not be fetched in 8 tries, the last failure being"),
        (lambda server: (server.folder / "0003.tar").write_bytes(b"<html>" * 99), r"0003\.tar is not a tar archive"),
        (lambda server: os.truncate(server.folder / "0003.tar", 5000), r"0003\.tar is truncated"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_sentence(
    tmp_path: Path, served: FaultyServer, monkeypatch: pytest.MonkeyPatch, break_it: Any, message: str
) -> None:
    monkeypatch.setattr(remote_module, "_FIRST_WAIT", 0.001)
    break_it(served)
    with pytest.raises(DataError, match=message) as caught:
        read(served, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_FIRST_WAIT", 0.001)
    data = WebDatasetDataModule(train="http://127.0.0.1:9/a.tar", global_batch_size=1, cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"a\.tar\.idx could not be fetched in 8 tries"):
        data.setup("fit")


def test_compressed_shards_are_unpacked_once(tmp_path: Path) -> None:
    shards = []
    for path in map(Path, write_numbered(tmp_path / "plain", [5, 5])):
        packed = tmp_path / f"{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        shards.append(str(packed))
    data = WebDatasetDataModule(train=shards, global_batch_size=5, cache_dir=str(tmp_path / "cache"))
    data.setup("fit")
    assert sorted(flat(batch["cls"].tolist() for batch in data.train_dataloader())) == list(range(10))
    for cut in (20, 200):
        Path(shards[1]).write_bytes(gzip.compress(Path(tmp_path / "plain/0001.tar").read_bytes())[:-cut])
        data = WebDatasetDataModule(train=shards, global_batch_size=5, cache_dir=str(tmp_path / f"cache{cut}"))
        with pytest.raises(DataError, match=r"0001\.tar\.gz is (truncated: its gzip stream has no end|damaged)"):
            data.setup("fit")


def test_a_shard_changed_since_it_was_indexed_is_refused(tmp_path: Path) -> None:
    (shard,) = write_numbered(tmp_path, [5])
    data = WebDatasetDataModule(train=shard, global_batch_size=1)
    data.setup("fit")
    source = data._train_sources["train"]
    source.reader._open.clear()
    save_index(open_index(Path(shard)), index_path(shard))
    write_numbered(tmp_path, [20])
    with pytest.raises(DataError, match="is of a shard of 20480 bytes, which now has 51200"):
        list(data.train_dataloader())
