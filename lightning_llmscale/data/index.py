"""Where each sample of a shard lies: the members of a tar, grouped by key, as a few numpy arrays.

Grouping follows webdataset (``tariterators.base_plus_ext``): the key of ``a/b.seg.png`` is ``a/b``, its extension
``seg.png`` in lower case; names without an extension and names like ``__meta__`` are not samples. Unlike webdataset,
members of a key that are not adjacent still make one sample. A second member with the same key *and* extension begins
another sample, so nothing is dropped.
"""

from __future__ import annotations

__all__ = ["ShardIndex", "index_path", "load_index", "save_index"]

import json
import os
import re
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_llmscale.data.tar import Member
from lightning_llmscale.errors import DataError

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_MAGIC = b"LLMSIDX1"
_ARRAYS = {"first_member": "<i8", "offset": "<i8", "size": "<i8", "extension": "<u2", "key_end": "<i8"}


@dataclass(frozen=True)
class ShardIndex:
    """Samples of one shard.

    Sample ``i`` has the members ``first_member[i] : first_member[i + 1]``.
    """

    shard_bytes: int
    """Size of the shard this index was made from."""
    extensions: tuple[str, ...]
    """Distinct extensions; ``extension`` holds numbers into it."""
    first_member: NDArray[np.int64]
    """First member of each sample, and the number of members; shape (samples + 1,)."""
    offset: NDArray[np.int64]
    """First byte of each member's payload."""
    size: NDArray[np.int64]
    """Bytes of each member's payload."""
    extension: NDArray[np.uint16]
    """Extension number of each member."""
    key_end: NDArray[np.int64]
    """End of each sample's key in ``keys``; shape (samples,)."""
    keys: bytes
    """UTF-8 keys of all samples, one after the other."""

    def __len__(self) -> int:
        return len(self.key_end)

    def key(self, sample: int) -> str:
        """Key of a sample, as webdataset gives it in ``__key__``."""
        start = int(self.key_end[sample - 1]) if sample else 0
        return self.keys[start : int(self.key_end[sample])].decode("utf-8", "surrogateescape")

    def member_of(self, extension: str, shard: str) -> NDArray[np.int64]:
        """Number of the member with this extension in each sample.

        Raises:
            DataError: A sample has no such member.
        """
        samples = np.repeat(np.arange(len(self)), np.diff(self.first_member))
        number = self.extensions.index(extension) if extension in self.extensions else -1
        members = np.flatnonzero(self.extension == number)
        if len(members) != len(self) or (samples[members] != np.arange(len(self))).any():
            lacking = int(np.setdiff1d(np.arange(len(self)), samples[members])[0])
            raise DataError(
                f"{shard}: sample {self.key(lacking)!r} has no member .{extension} (the shard's extensions: "
                f"{', '.join(self.extensions)}); name the extension that holds the text with text_key=."
            )
        return members

    @classmethod
    def from_members(
        cls, members: Iterable[Member], shard_bytes: int, shard: str, allow_empty: bool = False
    ) -> ShardIndex:
        """Group the members of a shard into samples.

        Args:
            members: Members in stored order.
            shard_bytes: Size of the shard.
            shard: Name for error messages.
            allow_empty: Accept a shard without samples.

        Raises:
            DataError: No sample in the shard, or a name that points outside of it.
        """
        number_of: dict[str, int] = {}
        extension_number: dict[str, int] = {}
        keys: list[str] = []
        taken: set[tuple[int, int]] = set()
        rows: list[tuple[int, int, int, int]] = []
        for name, offset, size in members:
            match = _NAME.match(name)
            if match is None or _META.match(name):
                continue
            key, suffix = match[1], match[2].lower()
            if key.startswith("/") or ".." in key.split("/"):
                raise DataError(f"{shard}: the name {name!r} points outside of the shard; rename this member.")
            sample = number_of.get(key, -1)
            extension = extension_number.setdefault(suffix, len(extension_number))
            if sample < 0 or (sample, extension) in taken:
                sample = number_of[key] = len(keys)
                keys.append(key)
            taken.add((sample, extension))
            rows.append((sample, offset, size, extension))
        if not rows and not allow_empty:
            raise DataError(
                f"{shard} holds no samples (no member has a name like key.extension); take it out of the list."
            )
        table = np.array(rows, np.int64).reshape(-1, 4)
        table = table[np.argsort(table[:, 0], kind="stable")]
        encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
        return cls(
            shard_bytes=shard_bytes,
            extensions=tuple(extension_number),
            first_member=np.searchsorted(table[:, 0], np.arange(len(keys) + 1)).astype(np.int64),
            offset=np.ascontiguousarray(table[:, 1]),
            size=np.ascontiguousarray(table[:, 2]),
            extension=table[:, 3].astype(np.uint16),
            key_end=np.cumsum([len(key) for key in encoded]).astype(np.int64),
            keys=b"".join(encoded),
        )


def index_path(shard: str | os.PathLike[str]) -> Path:
    """Path of the index that may lie beside a shard."""
    return Path(f"{os.fspath(shard)}.idx")


def save_index(index: ShardIndex, path: Path) -> None:
    """Write an index; the file appears under its name only when complete."""
    arrays = {name: np.ascontiguousarray(getattr(index, name), dtype) for name, dtype in _ARRAYS.items()}
    body = b"".join(array.tobytes() for array in arrays.values()) + index.keys
    head = {
        "shard_bytes": index.shard_bytes,
        "extensions": index.extensions,
        "lengths": {name: len(array) for name, array in arrays.items()},
        "keys": len(index.keys),
        "crc32": zlib.crc32(body),
    }
    text = json.dumps(head).encode()
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        partial.write_bytes(_MAGIC + len(text).to_bytes(4, "little") + text + body)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"Cannot write the index {path}: {error.strerror}; make the folder writable.") from error


def load_index(path: Path, shard_bytes: int | None = None) -> ShardIndex:
    """Read an index that :func:`save_index` wrote.

    Args:
        path: File to read.
        shard_bytes: Present size of the shard, if known; an index of another size is refused.

    Raises:
        DataError: The file is damaged, or belongs to another version of the shard.
    """
    remedy = f"delete it, or run `llmscale data index {path.with_suffix('')}`."
    raw = path.read_bytes()
    try:
        if raw[:8] != _MAGIC:
            raise ValueError("not an index file")
        start = 12 + int.from_bytes(raw[8:12], "little")
        head, body = json.loads(raw[12:start]), raw[start:]
        if zlib.crc32(body) != head["crc32"]:
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError) as error:
        raise DataError(f"The index {path} is unreadable ({error}); {remedy}") from error
    if shard_bytes is not None and head["shard_bytes"] != shard_bytes:
        raise DataError(
            f"The index {path} is of a shard of {head['shard_bytes']} bytes, which now has {shard_bytes}; {remedy}"
        )
    arrays, position = {}, 0
    for name, dtype in _ARRAYS.items():
        arrays[name] = np.frombuffer(body, dtype, head["lengths"][name], position)
        position += arrays[name].nbytes
    return ShardIndex(
        head["shard_bytes"], tuple(head["extensions"]), **arrays, keys=body[position : position + head["keys"]]
    )
