"""Look into shards: write indexes, find every damage, count what is there."""

from __future__ import annotations

__all__ = ["ShardReport", "Summary", "index_shards", "inspect_shards", "plot_lengths", "verify_shards"]

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from lightning_llmscale.data.decoding import Decoder
from lightning_llmscale.data.index import ShardIndex, index_path, save_index
from lightning_llmscale.data.order import Int
from lightning_llmscale.data.reader import OpenShard, ShardReader, map_file
from lightning_llmscale.data.remote import is_compressed, is_remote
from lightning_llmscale.data.tar import scan_tar
from lightning_llmscale.data.tokens import make_token_reader
from lightning_llmscale.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the number of shards done and of all."""

T = TypeVar("T")


@dataclass(frozen=True)
class ShardReport:
    """What was found in a shard."""

    shard: str
    """Path or URL."""
    size: int
    """Bytes."""
    samples: int
    """Samples that can be read."""
    problems: tuple[str, ...]
    """Damages, one sentence each."""
    sha256: str | None = None
    """Hash of the shard, when asked for."""


@dataclass
class Summary:
    """Counts over a list of shards."""

    shards: int = 0
    samples: int = 0
    size: int = 0
    """Bytes of all shards."""
    extensions: dict[str, int] = field(default_factory=dict)
    """Members of each extension."""
    lengths: Int = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of each document, or bytes of each sample where there are no documents."""
    tokens: int | None = None
    """Tokens of all documents."""

    def table(self) -> str:
        """Format the counts as text."""
        rows = [("shards", f"{self.shards:,}"), ("samples", f"{self.samples:,}"), ("bytes", f"{self.size:,}")]
        rows += [(f"members .{name}", f"{count:,}") for name, count in sorted(self.extensions.items())]
        unit = "bytes a sample" if self.tokens is None else "tokens a document"
        if self.tokens is not None:
            rows.append(("tokens", f"{self.tokens:,}"))
        if len(self.lengths):
            for name, share in (("smallest", 0), ("median", 50), ("90 %", 90), ("99 %", 99), ("largest", 100)):
                rows.append((f"{unit}, {name}", f"{int(np.percentile(self.lengths, share)):,}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:>20}" for name, value in rows)


def _each(count: int, work: Callable[[int], T], jobs: int, progress: Progress | None) -> Iterator[T]:
    with ThreadPoolExecutor(jobs) as pool:
        for done, result in enumerate(pool.map(work, range(count)), 1):
            if progress is not None:
                progress(done, count)
            yield result


def index_shards(reader: ShardReader, jobs: int = 4, progress: Progress | None = None) -> int:
    """Write an index beside each shard, which spares each process of each run from scanning (or fetching) it.

    Args:
        reader: The shards, local or remote.
        jobs: Threads.
        progress: Told how far it is.

    Returns:
        Number of samples.

    Raises:
        DataError: A shard is damaged, or an index cannot be written.
    """

    def work(number: int) -> int:
        shard = reader.shards[number]
        if is_compressed(shard):
            raise DataError(f"{shard} is compressed and cannot be indexed in place; unpack it.")
        if is_remote(shard):
            return ShardReader([shard], *reader.connections).publish_index(0)
        path = Path(shard)
        view = map_file(path)
        index = ShardIndex.from_members(scan_tar(view, shard), len(view), shard)
        save_index(index, index_path(path))
        return len(index)

    return sum(_each(len(reader.shards), work, jobs, progress))


def verify_shards(
    reader: ShardReader,
    *,
    decode: bool = False,
    sha256: bool = False,
    jobs: int = 4,
    progress: Progress | None = None,
) -> list[ShardReport]:
    """Find every damage: what is no tar, is cut, has a broken header, a name without a sample, or cannot be decoded.

    Args:
        reader: The shards, local or remote, made with ``tolerant=False``.
        decode: Decode every member too.
        sha256: Hash each shard.
        jobs: Threads.
        progress: Told how far it is.
    """

    def work(number: int) -> ShardReport:
        shard, problems = reader.shards[number], list[str]()
        try:
            index, view = ShardReader([shard], *reader.connections).open(0)
        except DataError as error:
            return ShardReport(shard, 0, 0, (str(error),))
        try:
            scanned = ShardIndex.from_members(scan_tar(view, shard), len(view), shard)
            if scanned.offset.tolist() != index.offset.tolist():
                problems.append(f"The index of {shard} does not describe it; run `llmscale data index {shard}`.")
            if decode:
                problems += _undecodable(shard, scanned, view)
        except DataError as error:
            problems.append(str(error))
        return ShardReport(
            shard, len(view), len(index), tuple(problems), hashlib.sha256(view).hexdigest() if sha256 else None
        )

    return list(_each(len(reader.shards), work, jobs, progress))


def _undecodable(shard: str, index: ShardIndex, view: memoryview) -> Iterator[str]:
    decoder, opened = Decoder(), OpenShard(shard, index, view, None)
    for sample in range(len(index)):
        try:
            decoder(opened, sample)
        except DataError as error:
            yield str(error)


def inspect_shards(
    reader: ShardReader, *, text_key: str = "txt", tokenizer: str | None = None, progress: Progress | None = None
) -> Summary:
    """Count samples, members, bytes, and tokens when a tokenizer is named.

    Args:
        reader: The shards.
        text_key: Extension of the documents.
        tokenizer: See :func:`.tokens.make_token_reader`.
        progress: Told how far it is.
    """
    tokens = make_token_reader(tokenizer, text_key) if tokenizer else None
    summary, lengths = Summary(), list[Int]()
    for number, shard in enumerate(reader.shards):
        index = reader.index(number)
        summary.shards += 1
        summary.samples += len(index)
        summary.size += index.shard_bytes
        counts = np.bincount(index.extension, minlength=len(index.extensions))
        for name, count in zip(index.extensions, counts.tolist(), strict=True):
            summary.extensions[name] = summary.extensions.get(name, 0) + count
        if tokens is None:
            lengths.append(np.add.reduceat(index.size, index.first_member[:-1]))
        else:
            members = index.member_of(text_key, shard)
            lengths.append(tokens.lengths(index, members, lambda number=number: reader.open(number)[1], shard))  # type: ignore[misc]
        if progress is not None:
            progress(number + 1, len(reader.shards))
    summary.lengths = np.concatenate(lengths)
    summary.tokens = int(summary.lengths.sum()) if tokens is not None else None
    return summary


def plot_lengths(summary: Summary, path: Path) -> None:
    """Write a histogram of lengths as a PNG.

    Args:
        summary: What :func:`inspect_shards` returned.
        path: File to write.

    Raises:
        DataError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lengths = np.maximum(summary.lengths, 1)
    low, high = int(lengths.min()), int(lengths.max())
    axes.hist(lengths, bins=np.geomspace(low, high + 1, 60).tolist() if high > 20 * low else 60)
    axes.set_xscale("log" if high > 20 * low else "linear")
    axes.set_xlabel("bytes of a sample" if summary.tokens is None else "tokens of a document")
    axes.set_ylabel("samples")
    axes.set_title(f"{summary.samples:,} samples in {summary.shards:,} shards")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"Cannot write {path}: {error.strerror}; choose a folder you can write.") from error
