"""The node cache: single flight, limit, pins, and what a killed process leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_llmscale.data.cache import CacheWriter, ShardCache, parse_bytes
from lightning_llmscale.errors import ConfigurationError, DataError


def put(cache: ShardCache, url: str, size: int = 1000) -> int:
    """Bring a shard in; returns its pin."""

    def fetch(writer: CacheWriter) -> None:
        writer.expect(size)
        writer.write(bytes([len(url) % 256]) * size)

    path, pin = cache.pin(url, fetch, lambda partial: None)
    assert path.stat().st_size == size
    return pin


def shards(cache: ShardCache) -> set[Path]:
    return {path for path in cache.root.iterdir() if path.suffix == ".tar"}


@pytest.mark.parametrize(
    ("text", "size"), [("200GB", 200 * 10**9), ("1.5 mb", 1_500_000), ("7", 7), (12, 12), ("3K", 3000), ("5B", 5)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes("cache_limit", text) == size


@pytest.mark.parametrize("text", ["many", "-3GB", "1EB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cache_limit=.* is not a size; write for example '200GB'"):
        parse_bytes("cache_limit", text)


def test_equal_names_in_two_datasets_do_not_meet(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10_000)
    assert cache.path("http://h/a/000.tar") != cache.path("http://h/b/000.tar")


def test_the_least_recently_used_goes_first_and_pins_stay(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3000)
    pins = {name: put(cache, name) for name in "abc"}
    for name in "bc":
        os.close(pins[name])
    os.utime(cache.path("b"), (10, 10))
    os.close(put(cache, "d"))
    assert shards(cache) == {cache.path(name) for name in "acd"}
    os.utime(cache.path("a"), (1, 1))
    os.close(put(cache, "e"))
    assert cache.path("a") in shards(cache)  # oldest, but in use
    os.close(pins["a"])


def test_a_shard_is_fetched_once(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3000)
    os.close(put(cache, "a"))
    _, pin = cache.pin("a", lambda writer: pytest.fail("fetched again"), lambda partial: None)
    os.close(pin)


def test_no_room_is_said_so(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 2500, wait=0.2)
    with pytest.raises(DataError, match=r"no room for a shard of 3000 bytes: cache_limit is 2500 bytes"):
        put(cache, "big", 3000)
    pins = [put(cache, "a"), put(cache, "b")]
    with pytest.raises(DataError, match="what is in use cannot be evicted; raise cache_limit"):
        put(cache, "c")
    assert not list(tmp_path.glob("*.part"))
    for pin in pins:
        os.close(pin)
    os.close(put(cache, "c"))


def test_a_failed_fetch_or_verification_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 5000)

    def cut(writer: CacheWriter) -> None:
        writer.write(b"half")
        raise DataError("cut")

    def wrong(partial: Path) -> None:
        raise DataError("no tar")

    for fetch, verify in [(cut, lambda partial: None), (lambda writer: writer.write(b"x"), wrong)]:
        with pytest.raises(DataError, match=r"cut|no tar"):
            cache.pin("a", fetch, verify)
        assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_shard_of_unknown_size_takes_room_as_it_grows(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 200 << 20)
    path, pin = cache.pin("a", lambda writer: [writer.write(b"x" * 1000) for _ in range(5)], lambda p: None)  # type: ignore[arg-type,return-value]
    os.close(pin)
    assert path.read_bytes() == b"x" * 5000


def test_the_leftover_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 2000)
    stale = tmp_path / "0000.dead.part"
    stale.write_bytes(bytes(1500))
    os.close(put(cache, "a"))
    assert not stale.exists()


def test_a_full_disk_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = ShardCache(tmp_path, 5000)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"The disk of the cache .* is full while it fetches a; free some space"):
        put(cache, "a")
    assert not list(tmp_path.glob("*.part"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"):
        ShardCache(tmp_path / "file" / "cache", 100)
