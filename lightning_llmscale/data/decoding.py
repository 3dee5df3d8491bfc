"""Turn the bytes of a sample's members into Python objects, by extension.

The meaning of an extension is webdataset's. Nothing here executes code from a shard: there is no pickle in the table.
"""

from __future__ import annotations

__all__ = ["decode_sample", "npy_layout"]

import ast
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightning_llmscale.errors import DataError


def _text(raw: memoryview) -> str:
    return str(raw, "utf-8")


def npy_layout(raw: memoryview) -> tuple[int, np.dtype[Any], tuple[int, ...], bool]:
    """Parse the header of an npy file; numpy's own reader spends most of a small array's time on it.

    Returns:
        Start of the data in bytes, dtype, shape, and whether the order is Fortran's.

    Raises:
        ValueError: Not an npy file, or an array of Python objects.
    """
    if bytes(raw[:6]) != b"\x93NUMPY":
        raise ValueError("not an npy file")
    fixed = 12 if raw[6] > 1 else 10
    start = fixed + int.from_bytes(raw[8:fixed], "little")
    header = bytes(raw[fixed:start])
    parsed = _HEADERS.get(header)
    if parsed is None:
        fields = ast.literal_eval(header.decode("utf-8" if raw[6] > 2 else "latin1"))
        dtype = np.dtype(fields["descr"])
        if dtype.hasobject:
            raise ValueError("an array of Python objects would have to be unpickled; store numbers")
        parsed = dtype, fields["shape"], fields["fortran_order"]
        if len(_HEADERS) < 4096:  # datasets repeat few headers; a hostile one must not fill the memory
            _HEADERS[header] = parsed
    return start, *parsed


_HEADERS: dict[bytes, tuple[np.dtype[Any], tuple[int, ...], bool]] = {}


def _array(raw: memoryview) -> np.ndarray[Any, Any]:
    start, dtype, shape, fortran = npy_layout(raw)
    # a copy: torch wants writable memory, and a batch must not keep a shard mapped
    flat = np.frombuffer(raw, dtype, math.prod(shape), start).copy()
    return flat.reshape(shape, order="F" if fortran else "C")


DECODERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), lambda raw: int(bytes(raw))),
    **dict.fromkeys(("json", "jsn"), lambda raw: json.loads(bytes(raw))),
    "npy": _array,
    "bin": bytes,
}


def decode_sample(key: str, shard: str, members: Mapping[str, memoryview]) -> dict[str, Any]:
    """Decode a sample into webdataset's form: ``__key__``, ``__url__`` and one entry for each extension.

    The last part of a dotted extension decides (``seg.npy`` is an array); unknown extensions stay bytes.

    Raises:
        DataError: A member's bytes do not have the form its extension says.
    """
    sample: dict[str, Any] = {"__key__": key, "__url__": shard}
    for extension, raw in members.items():
        decode = DECODERS.get(extension.rpartition(".")[2], bytes)
        try:
            sample[extension] = decode(raw)
        except (ValueError, KeyError, TypeError, SyntaxError) as error:
            raise DataError(
                f"{shard}: member .{extension} of sample {key!r} cannot be decoded ({error}); repair or remove it."
            ) from error
    return sample
