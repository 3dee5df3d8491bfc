"""Read samples of a local shard by number: its index and a memory map, no parsing on the way."""

from __future__ import annotations

__all__ = ["ShardReader", "open_index"]

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from lightning_llmscale.data.index import ShardIndex, index_path, load_index
from lightning_llmscale.data.tar import Member, scan_tar
from lightning_llmscale.errors import DataError


def _map(path: Path) -> memoryview:
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
        members = scan_tar(_map(path), str(path))
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


class ShardReader:
    """Random access to the samples of many shards, the most recent of which stay open.

    Args:
        paths: Shards, addressed by their place in this list.
        tolerant: Read damaged shards as far as they go.
        open_shards: Maps and indexes kept; an index costs about 30 bytes a member.

    Attributes:
        damages: What is wrong with shards that were opened, when tolerant.
    """

    def __init__(self, paths: list[Path], tolerant: bool = False, open_shards: int = 512) -> None:
        self.paths = paths
        self.damages: list[str] | None = [] if tolerant else None
        self._limit = open_shards
        self._open: OrderedDict[int, tuple[ShardIndex, memoryview]] = OrderedDict()

    def open(self, shard: int) -> tuple[ShardIndex, memoryview]:
        """Return the index of a shard and a view of its bytes."""
        entry = self._open.get(shard)
        if entry is None:
            index = open_index(self.paths[shard], self.damages)
            view = _map(self.paths[shard])
            if len(view) != index.shard_bytes:
                raise DataError(f"{self.paths[shard]} changed while it was read; start the run again.")
            entry = self._open[shard] = index, view
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(shard)
        return entry

    def sample(self, shard: int, number: int) -> dict[str, memoryview]:
        """Return the members of a sample, keyed by extension, as views of the map."""
        index, view = self.open(shard)
        members = range(int(index.first_member[number]), int(index.first_member[number + 1]))
        return {
            index.extensions[index.extension[m]]: view[int(index.offset[m]) : int(index.offset[m]) + int(index.size[m])]
            for m in members
        }

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": OrderedDict()}
