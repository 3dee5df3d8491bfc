"""Shards for tests, written by the standard library's tarfile and not by the code under test."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def flat(parts: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_numbered(folder: Path, counts: Sequence[int]) -> list[str]:
    """Shards of samples ``{cls: number over all shards, json: {"shard": s}}``."""
    paths, number = [], 0
    for shard, count in enumerate(counts):
        members = []
        for _ in range(count):
            members += [
                (f"{number:06d}.cls", str(number).encode()),
                (f"{number:06d}.json", json.dumps({"shard": shard}).encode()),
            ]
            number += 1
        paths.append(str(write_tar(folder / f"{shard:04d}.tar", members)))
    return paths


def write_texts(folder: Path, texts: Sequence[Sequence[bytes]]) -> list[str]:
    """One shard for each list of documents."""
    return [
        str(write_tar(folder / f"{n:04d}.tar", [(f"{n:04d}_{i:04d}.txt", text) for i, text in enumerate(documents)]))
        for n, documents in enumerate(texts)
    ]


def random_texts(seed: int, shards: int, most: int = 30, longest: int = 200) -> list[list[bytes]]:
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(97, 123, rng.integers(0, longest)).astype(np.uint8).tobytes()
            for _ in range(rng.integers(1, most))
        ]
        for _ in range(shards)
    ]
