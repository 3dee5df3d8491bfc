"""Convert text collections into shards: jsonl, parquet, text files and folders of them, Hugging Face datasets on disk.

The work is cut into shards before anything is written: shard ``n`` holds a fixed range of records, so shards are
written in parallel, a run that was killed goes on with the shards that are missing, and the bytes are always the
same.
"""

from __future__ import annotations

__all__ = ["ShardJob", "convert", "plan_shards"]

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llmscale.data.inspection import index_shards
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.tokens import TextTokens, make_token_reader
from lightning_llmscale.data.writer import check_pattern, write_shard
from lightning_llmscale.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class ShardJob:
    """The records of one shard."""

    number: int
    """Number of the shard."""
    source: str
    """Input file or folder."""
    first: int
    """First record of the source."""
    count: int
    """Number of records."""


def plan_shards(inputs: Sequence[str], samples_per_shard: int) -> list[ShardJob]:
    """Cut inputs into shards.

    Args:
        inputs: Files (``.jsonl``, ``.parquet``, any other is text), folders of text files, Hugging Face datasets on
            disk.
        samples_per_shard: Most records in a shard.

    Raises:
        DataError: An input does not exist or is empty.
    """
    jobs: list[ShardJob] = []
    for source in inputs:
        if not Path(source).exists():
            raise DataError(f"There is no {source}; check the path.")
        records = _kind(source).count(source)
        for first in range(0, records, samples_per_shard):
            jobs.append(ShardJob(len(jobs), source, first, min(samples_per_shard, records - first)))
    if not jobs:
        raise DataError(f"There is nothing to pack in {', '.join(inputs) or 'an empty list'}; check the inputs.")
    return jobs


def convert(
    inputs: Sequence[str],
    pattern: str,
    *,
    text: str = "text",
    tokenizer: str | None = None,
    samples_per_shard: int = 10_000,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write shards and their indexes; a shard that is there already is kept.

    Args:
        inputs: See :func:`plan_shards`.
        pattern: Path of the shards, such as ``"shards/train-%06d.tar"``.
        text: Field of jsonl, parquet and datasets that holds the text; the others go to a json member.
        tokenizer: Store token ids (``tokens.npy``) instead of text: a ``tokenizer.json`` or ``"tiktoken:<encoding>"``.
        samples_per_shard: Most records in a shard.
        jobs: Processes.
        progress: Told how many shards are done, and of how many.

    Returns:
        The shards, in order.

    Raises:
        DataError: An input cannot be read, a record has no such field, or the folder holds shards of other inputs.
    """
    check_pattern(pattern)
    planned = plan_shards(inputs, samples_per_shard)
    _check_same_plan(pattern, planned, text, tokenizer)
    paths = [Path(pattern % job.number) for job in planned]
    missing = [job for job, path in zip(planned, paths, strict=True) if not path.exists()]
    done = len(planned) - len(missing)
    work = [(job, pattern, text, tokenizer) for job in missing]
    # spawn: a fork of a process with threads, as torch starts them, may hang
    with ProcessPoolExecutor(min(jobs, max(1, len(work))), get_context("spawn")) as pool:
        for result in pool.map(_write, work) if jobs > 1 else map(_write, work):
            del result
            done += 1
            if progress is not None:
                progress(done, len(planned))
    index_shards(ShardReader([str(path) for path in paths]))
    return paths


def _check_same_plan(pattern: str, planned: Sequence[ShardJob], text: str, tokenizer: str | None) -> None:
    """Refuse to mix shards of two conversions in one folder."""
    options = {"jobs": [asdict(job) for job in planned], "text": text, "tokenizer": tokenizer}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    record = Path(pattern.replace("%", "_")).with_suffix(".plan")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        if record.exists() and record.read_text() != digest:
            raise DataError(
                f"{record.parent} holds shards that were made from other inputs or with other options; give another "
                f"folder, or delete {record.name} and the shards."
            )
        record.write_text(digest)
    except OSError as error:
        raise DataError(f"Cannot write to {record.parent}: {error.strerror}; choose a folder you can write.") from error


def _write(work: tuple[ShardJob, str, str, str | None]) -> None:
    job, pattern, text, tokenizer = work
    reader = make_token_reader(tokenizer, "txt") if tokenizer else None
    if reader is not None and not isinstance(reader, TextTokens):
        raise ConfigurationError(
            f"tokenizer={tokenizer!r} does not tokenise text; name a tokenizer.json, or leave it out."
        )
    samples = (
        _sample(f"{job.number:06d}_{number:08d}", record, text, reader, job.source)
        for number, record in enumerate(_kind(job.source).read(job.source, job.first, job.count), job.first)
    )
    write_shard(Path(pattern % job.number), samples)


def _sample(key: str, record: dict[str, Any], text: str, tokens: TextTokens | None, source: str) -> dict[str, Any]:
    if not isinstance(record.get(text), str):
        raise DataError(
            f"{source}: record {key} has no text in {text!r} but {', '.join(record)}; name the field with text=."
        )
    rest = {name: value for name, value in record.items() if name != text}
    sample: dict[str, Any] = {"__key__": key}
    if rest:
        sample["json"] = json.dumps(rest, sort_keys=True, default=str).encode()
    if tokens is None:
        return sample | {"txt": record[text].encode()}
    ids = tokens.encode(record[text])
    return sample | {"tokens.npy": _npy(ids, tokens)}


def _npy(ids: list[int], tokens: TextTokens) -> bytes:
    import io

    buffer = io.BytesIO()
    end = [tokens.separator] if tokens.separator is not None else []
    np.save(buffer, np.array(ids + end, np.uint16 if tokens.vocab_size <= 1 << 16 else np.uint32))
    return buffer.getvalue()


@dataclass(frozen=True)
class _Kind:
    """How to count and to read the records of a kind of input."""

    count: Callable[[str], int]
    read: Callable[[str, int, int], Iterator[dict[str, Any]]]


def _kind(source: str) -> _Kind:
    path = Path(source)
    if path.is_dir():
        return _DATASET if (path / "dataset_info.json").exists() else _FOLDER
    return {".jsonl": _JSONL, ".parquet": _PARQUET}.get(path.suffix, _TEXT)


def _lines(source: str) -> int:
    with open(source, "rb") as file:
        return sum(1 for line in file if line.strip())


def _read_jsonl(source: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    with open(source, "rb") as file:
        for number, line in enumerate(islice((line for line in file if line.strip()), first, first + count), first + 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{source}: record {number} is not JSON ({error}); repair or remove it.") from error


def _files(source: str) -> list[str]:
    return sorted(str(path) for path in Path(source).rglob("*") if path.is_file())


def _read_files(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        try:
            yield {"text": Path(path).read_text("utf-8"), "path": os.fspath(path)}
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}); convert it.") from error


def _package(name: str, source: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigurationError(f"Reading {source} needs {package}; run: pip install {package}") from None


def _parquet_rows(source: str) -> int:
    return int(_package("pyarrow.parquet", source).ParquetFile(source).metadata.num_rows)


def _read_parquet(source: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    position = 0
    for batch in _package("pyarrow.parquet", source).ParquetFile(source).iter_batches(1024):
        low, high = max(0, first - position), min(batch.num_rows, first + count - position)
        if low < high:
            yield from batch.slice(low, high - low).to_pylist()
        position += batch.num_rows
        if position >= first + count:
            return


def _read_dataset(source: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    data = _package("datasets", source).load_from_disk(source)
    yield from data.select(range(first, first + count))


_JSONL = _Kind(_lines, _read_jsonl)
_PARQUET = _Kind(_parquet_rows, _read_parquet)
_TEXT = _Kind(lambda source: 1, lambda source, first, count: _read_files([source]))
_FOLDER = _Kind(
    lambda source: len(_files(source)),
    lambda source, first, count: _read_files(_files(source)[first : first + count]),
)
_DATASET = _Kind(lambda source: len(_package("datasets", source).load_from_disk(source)), _read_dataset)
