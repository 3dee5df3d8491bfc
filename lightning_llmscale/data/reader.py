"""Read samples of a shard by number: its index and a memory map, no parsing on the way."""

from __future__ import annotations

__all__ = ["OpenShard", "ShardReader", "map_file", "open_index"]

import mmap
import os
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_llmscale.data.cache import ShardCache
from lightning_llmscale.data.index import ShardIndex, index_path, load_index, save_index
from lightning_llmscale.data.remote import Fetcher, is_compressed, is_remote
from lightning_llmscale.data.tar import Member, scan_tar
from lightning_llmscale.errors import DataError


def map_file(path: Path) -> memoryview:
    """Map a file read-only; the view keeps the map alive, also when the file is unlinked."""
    with path.open("rb") as file:
        return memoryview(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
        )


def open_index(path: Path, damages: list[str] | None = None) -> ShardIndex:
    """Load the index beside a shard, or make one by scanning the shard's headers.

    Args:
        path: The shard.
        damages: Given, a damaged shard is read as far as it goes, and the damage is added to this list.

    Raises:
        DataError: The shard or its index cannot be used.
    """
    try:
        size, beside = path.stat().st_size, index_path(path)
        if beside.exists():
            return load_index(beside, size)
        members = scan_tar(map_file(path), str(path))
        if damages is None:
            return ShardIndex.from_members(members, size, str(path))
        return ShardIndex.from_members(_undamaged(members, damages), size, str(path), allow_empty=True)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}; check the path and its permissions.") from error


def _undamaged(members: Iterator[Member], damages: list[str]) -> Iterator[Member]:
    try:
        yield from members
    except DataError as error:
        damages.append(str(error))


@dataclass
class OpenShard:
    """A shard in memory: its index and a view of its bytes."""

    name: str
    """Path or URL."""
    index: ShardIndex
    """Where samples lie."""
    view: memoryview
    """All bytes of the shard."""
    pin: int | None
    """Descriptor that keeps a cached shard from being evicted."""

    def __post_init__(self) -> None:
        index = self.index
        # array.array gives Python ints three times as fast as numpy, and takes no more memory
        self.first_member = array("q", index.first_member.tobytes())
        self.start = array("q", index.offset.tobytes())
        self.end = array("q", (index.offset + index.size).tobytes())
        self.extension = array("H", index.extension.tobytes())
        self.key_end = array("q", [0, *index.key_end.tolist()])

    def key(self, sample: int) -> str:
        """Key of a sample."""
        return self.index.keys[self.key_end[sample] : self.key_end[sample + 1]].decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> dict[str, memoryview]:
        """Members of a sample, keyed by extension, as views."""
        names, view = self.index.extensions, self.view
        numbers = range(self.first_member[sample], self.first_member[sample + 1])
        return {names[self.extension[m]]: view[self.start[m] : self.end[m]] for m in numbers}


class ShardReader:
    """Random access to the samples of many shards, the most recent of which stay open.

    Args:
        shards: Paths and URLs, addressed by their place in this list.
        cache: Where shards that are remote or compressed are kept; needed when there are any.
        fetcher: Reads them.
        tolerant: Read damaged shards as far as they go.
        open_shards: Maps and indexes kept; an index costs about 30 bytes a member.

    Attributes:
        damages: What is wrong with shards that were opened, when tolerant.
    """

    def __init__(
        self,
        shards: Sequence[str],
        cache: ShardCache | None = None,
        fetcher: Fetcher | None = None,
        tolerant: bool = False,
        open_shards: int = 512,
    ) -> None:
        self.shards = list(shards)
        self.damages: list[str] | None = [] if tolerant else None
        self._cache, self._fetcher, self._limit = cache, fetcher, open_shards
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._cached = [is_remote(shard) or is_compressed(shard) for shard in self.shards]
        self.fetches = any(self._cached)
        """Whether some shards come through the cache."""

    @property
    def connections(self) -> tuple[ShardCache | None, Fetcher | None]:
        """Cache and fetcher, for another reader of the same shards."""
        return self._cache, self._fetcher

    def index(self, shard: int) -> ShardIndex:
        """Return the index of a shard; the shard itself is fetched only when there is no index of it."""
        if shard in self._open or not self._cached[shard]:
            return self.open(shard)[0]
        cache, fetcher = self._caching()
        url = self.shards[shard]
        beside = index_path(cache.path(url))
        if not beside.exists():
            stored = None if is_compressed(url) else fetcher.read(f"{url}.idx")
            if stored is None:
                return self.open(shard)[0]
            partial = beside.with_name(f"{beside.name}.{uuid.uuid4().hex[:8]}")
            partial.write_bytes(stored)
            partial.replace(beside)
        return load_index(beside)

    def open(self, shard: int) -> tuple[ShardIndex, memoryview]:
        """Return the index of a shard and a view of its bytes."""
        entry = self.opened(shard)
        return entry.index, entry.view

    def opened(self, shard: int) -> OpenShard:
        """Return a shard, opening it if needed."""
        entry = self._open.get(shard)
        if entry is None:
            while len(self._open) >= self._limit:  # before another is pinned: the cache may be small
                _close(self._open.popitem(last=False)[1])
            entry = self._open[shard] = self._open_cached(shard) if self._cached[shard] else self._open_local(shard)
            if len(entry.view) != entry.index.shard_bytes:
                raise DataError(f"{self.shards[shard]} changed while it was read; start the run again.")
        else:
            self._open.move_to_end(shard)
        return entry

    def _open_local(self, shard: int) -> OpenShard:
        path = Path(self.shards[shard].removeprefix("file://"))
        return OpenShard(self.shards[shard], open_index(path, self.damages), map_file(path), None)

    def _open_cached(self, shard: int) -> OpenShard:
        path, pin = self._pin(shard)
        return OpenShard(self.shards[shard], load_index(index_path(path)), map_file(path), pin)

    def _pin(self, shard: int) -> tuple[Path, int]:
        cache, fetcher = self._caching()
        url = self.shards[shard]

        def verify(partial: Path) -> None:
            view = map_file(partial)
            members = scan_tar(view, url)
            if self.damages is not None:
                members = _undamaged(members, self.damages)
            save_index(
                ShardIndex.from_members(members, len(view), url, allow_empty=self.damages is not None),
                index_path(cache.path(url)),
            )

        return cache.pin(url, lambda writer: fetcher.fetch(url, writer), verify)

    def fetch(self, shard: int) -> None:
        """Bring a shard into the cache, so that opening it does not wait for the network."""
        if self._cached[shard] and not self._caching()[0].contains(self.shards[shard]):
            os.close(self._pin(shard)[1])

    def publish_index(self, shard: int) -> int:
        """Write the index of a remote shard beside it; returns its number of samples."""
        cache, fetcher = self._caching()
        url = self.shards[shard]
        count = len(self.open(shard)[0])
        fetcher.write(f"{url}.idx", index_path(cache.path(url)).read_bytes())
        return count

    def _caching(self) -> tuple[ShardCache, Fetcher]:
        if self._cache is None or self._fetcher is None:
            raise DataError("Shards that are remote or compressed need a cache; give cache_dir.")
        return self._cache, self._fetcher

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": OrderedDict()}

    def __del__(self) -> None:
        for entry in getattr(self, "_open", {}).values():
            _close(entry)


def _close(entry: OpenShard) -> None:
    if entry.pin is not None:
        os.close(entry.pin)
