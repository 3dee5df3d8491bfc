"""Turn what a user writes for a dataset into the list of its shards."""

from __future__ import annotations

__all__ = ["expand_shards"]

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_llmscale.data.remote import is_remote
from lightning_llmscale.errors import DataError


def expand_shards(patterns: str | Sequence[str], name: str = "train") -> list[str]:
    """Expand brace patterns (``shards/{000000..000015}.tar``), globs, folders and lists of them.

    The order of the list is the order of validation, and a shard's place in it enters the shuffled order of training.

    Args:
        patterns: One pattern or several; ``a.tar::b.tar`` is a list too, as in webdataset.
        name: The argument, for error messages.

    Raises:
        DataError: A pattern is empty or matches nothing, or a shard is missing or listed twice.
    """
    given = [patterns] if isinstance(patterns, (str, Path)) else list(patterns)
    shards = [path for text in given for part in str(text).split("::") for path in _expand(part.strip(), name)]
    if not shards:
        raise DataError(
            f"{name}={patterns!r} names no shard; give a pattern such as 'shards/{name}-{{000000..000015}}.tar'."
        )
    if len(set(shards)) != len(shards):
        twice = next(path for path in shards if shards.count(path) > 1)
        raise DataError(f"{name}={patterns!r} names {twice} twice; list each shard once.")
    return shards


def _expand(pattern: str, name: str) -> Iterator[str]:
    if not pattern:
        raise DataError(
            f"{name} contains an empty pattern; give a path such as 'shards/{name}-{{000000..000015}}.tar'."
        )
    if pattern.startswith("pipe:"):
        raise DataError(f"{name}={pattern!r} would run a shell command, which is not done; give the URL itself.")
    from braceexpand import braceexpand

    try:
        texts = list(braceexpand(pattern))
    except ValueError:  # the package's own UnbalancedBracesError
        raise DataError(f"{name}={pattern!r} has unbalanced braces; write a range as {{000000..000015}}.") from None
    for text in texts:
        found = _remote(text) if is_remote(text) else _local(text)
        if not found:
            of = "" if text == pattern else f" (from {name}={pattern!r})"
            raise DataError(f"No shard at {text!r}{of} in {Path.cwd()}; check the path, or write shards first.")
        yield from found


def _local(text: str) -> list[str]:
    if glob.has_magic(text):
        return sorted(glob.glob(text, recursive=True))
    path = Path(text.removeprefix("file://"))
    if path.is_dir():
        return sorted(str(shard) for shard in path.iterdir() if shard.name.endswith((".tar", ".tar.gz", ".tgz")))
    return [text] if path.is_file() else []


def _remote(text: str) -> list[str]:
    if not glob.has_magic(text):
        return [text]  # whether it exists is known when it is fetched
    import fsspec  # type: ignore[import-untyped]

    system, path = fsspec.core.url_to_fs(text)
    return sorted(system.unstrip_protocol(found) for found in system.glob(path))
