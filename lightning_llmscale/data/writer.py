"""Write text files into WebDataset shards."""

from __future__ import annotations

__all__ = ["check_pattern", "pack_text_files", "write_shard"]

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

from lightning_llmscale.errors import ConfigurationError, DataError

_REPRODUCIBLE: dict[str, Any] = {"mtime": 0, "user": "", "group": ""}


def pack_text_files(
    files: Iterable[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    pattern: str,
    *,
    shard_bytes: int = 64 << 20,
    samples_per_shard: int = 100_000,
) -> list[Path]:
    """Write each text file as one sample (``<key>.txt``) into shards named as webdataset's ``ShardWriter`` names them.

    The same files give the same bytes: no times, no user names. Each shard appears under its name only when complete.

    Args:
        files: Text files; a mapping gives the key of each, otherwise samples are numbered.
        pattern: Path of the shards with a printf place for the number, such as ``"shards/train-%06d.tar"``.
        shard_bytes: Bytes of text after which a shard is closed.
        samples_per_shard: Samples after which a shard is closed.

    Returns:
        The shards written, in order.

    Raises:
        ConfigurationError: A pattern without a place for the number.
        DataError: A file that is not UTF-8 text or cannot be read, a folder that cannot be written, or nothing to pack.
    """
    import webdataset

    check_pattern(pattern)
    named = files.items() if isinstance(files, Mapping) else ((f"{n:08d}", path) for n, path in enumerate(files))
    written: list[Path] = []

    def publish(name: str) -> None:
        final = Path(name.removesuffix(".part"))
        Path(name).replace(final)
        written.append(final)

    first = next(samples := _read(named), None)
    if first is None:
        raise DataError(
            f"There is nothing to pack into {pattern}: no files were given; check the folder or the pattern."
        )
    try:
        Path(pattern).parent.mkdir(parents=True, exist_ok=True)
        writer = webdataset.ShardWriter(
            f"{pattern}.part",
            maxcount=samples_per_shard,
            maxsize=shard_bytes,
            post=publish,
            verbose=0,
            opener=_open,
            **_REPRODUCIBLE,
        )
        try:
            for sample in chain([first], samples):
                writer.write(sample)
        except BaseException:
            Path(writer.fname).unlink(missing_ok=True)
            raise
        writer.close()
    except OSError as error:
        raise DataError(
            f"Cannot write shards to {pattern}: {error.strerror}; choose a folder you can write."
        ) from error
    return written


def check_pattern(pattern: str) -> None:
    """Refuse a pattern without a printf place for the shard's number.

    Raises:
        ConfigurationError: Both shard 0 and shard 1 would have this name.
    """
    try:
        if pattern % 0 == pattern % 1:
            raise TypeError
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"pattern={pattern!r} has no place for the shard's number; use for example 'shards/train-%06d.tar'."
        ) from None


def write_shard(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write one shard, which appears under its name only when complete.

    Args:
        path: The shard.
        samples: webdataset's dicts of ``__key__`` and bytes.
    """
    import webdataset

    partial = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(partial), _open(str(partial)) as file:
            with webdataset.TarWriter(file, **_REPRODUCIBLE) as writer:
                for sample in samples:
                    writer.write(sample)
        partial.replace(path)
    except OSError as error:
        raise DataError(f"Cannot write {path}: {error.strerror}; choose a folder you can write.") from error


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _open(name: str) -> IO[bytes]:
    return open(name, "wb")


def _read(named: Iterable[tuple[str, str | os.PathLike[str]]]) -> Iterator[dict[str, Any]]:
    for key, path in named:
        try:
            text = Path(path).read_bytes()
            text.decode("utf-8")
        except OSError as error:
            raise DataError(f"Cannot read {os.fspath(path)}: {error.strerror}; check the path.") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{os.fspath(path)} is not UTF-8 text ({error.reason}, byte {error.start}); convert it or leave it out."
            ) from error
        yield {"__key__": key, "txt": text}
