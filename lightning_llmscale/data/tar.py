"""Find the members of a tar archive by scanning its headers; payloads are not read.

Reads ustar, old v7, pax and GNU archives. Everything a reader of training data must not miss is an error here: damage,
truncation, sparse members. The reference is ``tarfile`` of the standard library; a test compares the two on random
archives.
"""

from __future__ import annotations

__all__ = ["Member", "scan_tar"]

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_llmscale.errors import DataError

_BLOCK = 512
_REGULAR = frozenset(b"0\x007")  # regular, old regular, contiguous
_WITHOUT_DATA = frozenset(b"123456")  # links, devices, folders, fifos: their size field counts no payload


class Member(NamedTuple):
    """A regular file in a tar archive."""

    name: str
    """Path in the archive, without a trailing slash."""
    offset: int
    """First byte of the payload in the archive."""
    size: int
    """Bytes of payload."""


def scan_tar(data: memoryview, shard: str) -> Iterator[Member]:
    """Yield the regular files of an archive in the order they are stored.

    Args:
        data: The whole archive, usually a memory map.
        shard: Name for error messages.

    Raises:
        DataError: The archive is not a tar, is damaged or truncated, or holds a sparse file.
    """
    if not len(data):
        raise DataError(f"{shard} is an empty file (0 bytes); write the shard again or take it out of the list.")
    position, pax, global_pax, long_name = 0, dict[str, str](), dict[str, str](), None
    while True:
        header = bytes(data[position : position + _BLOCK])
        if len(header) < _BLOCK:
            raise _truncated(shard, position, "has no end-of-archive block")
        if not header[0] and not any(header):
            return
        if not _checksum_holds(header):
            what = "is not a tar archive" if position == 0 else f"is damaged at byte {position}"
            raise DataError(f"{shard} {what} (the header's checksum does not match); write or fetch the shard again.")
        kind = header[156]
        payload = position + _BLOCK
        size = 0 if kind in _WITHOUT_DATA else int(pax["size"]) if "size" in pax else _number(header[124:136], shard)
        position = payload + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if payload + size > len(data):
            raise _truncated(shard, payload, f"ends inside a member of {size} bytes")
        if kind == 0x4C:  # L: GNU long name of the next member
            long_name = _text(bytes(data[payload : payload + size]).split(b"\0", 1)[0])
        elif kind == 0x78:  # x: pax records of the next member
            pax = global_pax | _pax_records(bytes(data[payload : payload + size]), shard)
        elif kind == 0x67:  # g: pax records of all that follow
            global_pax |= _pax_records(bytes(data[payload : payload + size]), shard)
            pax = dict(global_pax)
        elif kind == 0x4B:  # K: GNU long link name
            continue
        else:
            name = pax.get("path") or long_name or _header_name(header)
            if kind == 0x53 or any(key.startswith("GNU.sparse") for key in pax):
                raise DataError(
                    f"{shard}: member {name!r} is a sparse file, which is not supported; write it as a plain file."
                )
            if kind in _REGULAR and not (kind == 0 and name.endswith("/")):
                yield Member(name.rstrip("/"), payload, size)
            pax, long_name = dict(global_pax), None


def _truncated(shard: str, position: int, fact: str) -> DataError:
    return DataError(f"{shard} is truncated: at byte {position} it {fact}; write or fetch the shard again.")


def _checksum_holds(header: bytes) -> bool:
    """Compare the sum of the header's bytes, its own field counted as blanks, with the stored octal number."""
    field = header[148:156]
    try:
        stored = int(field.split(b"\0", 1)[0].strip() or b"-1", 8)
    except ValueError:
        return False
    total = int(np.frombuffer(header, np.uint8).sum()) - sum(field) + 8 * 32
    return stored == total or stored == _signed_sum(header, field)


def _signed_sum(header: bytes, field: bytes) -> int:
    """Some old writers sum signed bytes."""
    return int(np.frombuffer(header, np.int8).sum()) - int(np.frombuffer(field, np.int8).sum()) + 8 * 32


def _number(field: bytes, shard: str) -> int:
    if field[0] & 0x80:  # GNU base-256
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise DataError(
            f"{shard} is damaged: a header's size field reads {field!r}; write or fetch it again."
        ) from None


def _header_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":  # GNU archives use the prefix field otherwise
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return _text(name)


def _pax_records(block: bytes, shard: str) -> dict[str, str]:
    """Parse ``<length> <key>=<value>\\n`` records; the length counts the whole record."""
    records, position = dict[str, str](), 0
    while position < len(block) and block[position]:
        digits, blank, _ = block[position : position + 20].partition(b" ")
        if not blank or not digits.isdigit() or int(digits) <= len(digits) + 1:
            raise DataError(f"{shard} is damaged: a pax record has no length; write or fetch the shard again.")
        end = position + int(digits)
        key, _, value = block[position + len(digits) + 1 : end - 1].partition(b"=")
        records[_text(key)] = _text(value)
        position = end
    return records


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
