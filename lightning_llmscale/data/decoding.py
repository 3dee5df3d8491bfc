"""Turn the bytes of a sample's members into Python objects, by extension.

The meaning of an extension is webdataset's. Nothing here executes code from a shard unless the user trusts it.
"""

from __future__ import annotations

__all__ = ["Decoder", "npy_layout"]

import ast
import functools
import io
import json
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_llmscale.data.reader import OpenShard
from lightning_llmscale.errors import ConfigurationError, DataError, LlmscaleError

_LARGEST = 1 << 30
"""Bytes to which a compressed member may grow; a few kilobytes can otherwise fill the memory."""


def npy_layout(raw: memoryview) -> tuple[int, np.dtype[Any], tuple[int, ...], bool]:
    """Parse the header of an npy file; numpy's own reader spends most of a small array's time on it.

    Returns:
        Start of the data in bytes, dtype, shape, and whether the order is Fortran's.

    Raises:
        ValueError: Not an npy file, or an array of Python objects.
    """
    fixed = bytes(raw[:12])
    if len(fixed) < 12 or fixed[:6] != b"\x93NUMPY":
        raise ValueError("not an npy file")
    start = 12 + int.from_bytes(fixed[8:12], "little") if fixed[6] > 1 else 10 + int.from_bytes(fixed[8:10], "little")
    return start, *_parse_header(bytes(raw[12 if fixed[6] > 1 else 10 : start]))


_USUAL_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[biufc?]\d+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \}\s*$"
)
"""What numpy writes for arrays of numbers; thirty times as fast to match as to evaluate."""


@functools.lru_cache(maxsize=16_384)
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    match = _USUAL_HEADER.match(header)
    if match is not None:
        shape = tuple(int(size) for size in match[3].split(b",") if size.strip())
        return np.dtype(match[1].decode()), shape, match[2] == b"True"
    fields = ast.literal_eval(header.decode("utf-8"))
    dtype = np.dtype(fields["descr"])
    if dtype.hasobject:
        raise ValueError("an array of Python objects would have to be unpickled; store numbers")
    return dtype, fields["shape"], fields["fortran_order"]


def _array(raw: memoryview) -> np.ndarray[Any, Any]:
    start, dtype, shape, fortran = npy_layout(raw)
    # a copy: torch wants writable memory, and a batch must not keep a shard mapped
    flat = np.frombuffer(raw, dtype, math.prod(shape), start).copy()
    return flat if len(shape) == 1 else flat.reshape(shape, order="F" if fortran else "C")


def _arrays(raw: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        if sum(member.file_size for member in archive.infolist()) > _LARGEST:
            raise ValueError(f"it would unpack to more than {_LARGEST} bytes")
    with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _image(raw: memoryview) -> torch.Tensor:
    """Decode to uint8 RGB, shape (3, height, width)."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigurationError("Decoding images needs Pillow; run: pip install pillow") from None
    with Image.open(io.BytesIO(raw)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _gunzip(raw: memoryview) -> memoryview:
    inflate = zlib.decompressobj(wbits=31)
    data = inflate.decompress(raw, _LARGEST)
    if not inflate.eof:
        raise ValueError(
            f"it would unpack to more than {_LARGEST} bytes" if len(data) >= _LARGEST else "its gzip is cut"
        )
    return memoryview(data)


def _text(raw: memoryview) -> str:
    return str(raw, "utf-8")


def _number(raw: memoryview) -> int:
    return int(bytes(raw))


def _json(raw: memoryview) -> Any:
    return _parse_json(str(raw, "utf-8"))  # json.loads would first guess the encoding


_parse_json = json.JSONDecoder().decode


_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _number),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), _image),
    "npy": _array,
    "npz": _arrays,
}
_UNDECODABLE = (
    ValueError,
    LookupError,
    TypeError,
    SyntaxError,
    OSError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
_PICKLES = ("pyd", "pickle")


class Decoder:
    """Decodes members by the last part of their extension (``seg.npy`` is an array); unknown ones stay bytes.

    ``txt`` gives str, ``json`` its objects, ``npy`` an array, ``npz`` a dict of arrays, ``cls`` and its like an int,
    ``jpg``, ``png`` and ``webp`` a uint8 tensor (3, height, width); ``.gz`` is unpacked first.

    Args:
        trusted: Unpickle ``pyd`` and ``pickle`` members. A pickle runs any code its writer chose.
        members: Extensions to decode, the others are left out; all when ``None``.
    """

    def __init__(self, trusted: bool = False, members: Sequence[str] | None = None) -> None:
        self._trusted, self._members = trusted, members
        self._tables: dict[tuple[str, ...], list[Callable[[memoryview], Any] | None]] = {}

    def __call__(self, shard: OpenShard, number: int) -> dict[str, Any]:
        """Decode a sample into webdataset's form: ``__key__``, ``__url__`` and one entry for each extension.

        Raises:
            DataError: A member's bytes do not have the form its extension says, or a pickle is not trusted.
        """
        names = shard.index.extensions
        decoders = self._tables.get(names) or self._table(names)
        view, start, end, extension = shard.view, shard.start, shard.end, shard.extension
        sample: dict[str, Any] = {"__key__": shard.key(number), "__url__": shard.name}
        member = 0
        try:
            for member in range(shard.first_member[number], shard.first_member[number + 1]):
                kind = extension[member]
                decode = decoders[kind]
                if decode is not None:
                    sample[names[kind]] = decode(view[start[member] : end[member]])
        except LlmscaleError:
            raise
        except _UNDECODABLE as error:
            raise DataError(
                f"{shard.name}: member .{names[extension[member]]} of sample {shard.key(number)!r} cannot be decoded "
                f"({error}); repair or remove it."
            ) from error
        return sample

    def _table(self, names: tuple[str, ...]) -> list[Callable[[memoryview], Any] | None]:
        """Decoder of each extension of a shard; None for those not wanted."""
        wanted = self._members
        self._tables[names] = [self._choose(name) if wanted is None or name in wanted else None for name in names]
        return self._tables[names]

    def _choose(self, extension: str) -> Callable[[memoryview], Any]:
        kind = extension.removesuffix(".gz").rpartition(".")[2]
        decode = self._unpickle if kind in _PICKLES else _DECODERS.get(kind, bytes)
        return (lambda raw: decode(_gunzip(raw))) if extension.endswith(".gz") else decode

    def _unpickle(self, raw: memoryview) -> Any:
        if not self._trusted:
            raise ValueError("it is a pickle, which can run any code; give trusted=True if you know who wrote it")
        return pickle.loads(raw)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}
