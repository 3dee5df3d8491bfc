"""Turn what a user writes for a dataset into the list of its shards."""

from __future__ import annotations

__all__ = ["expand_shards"]

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_llmscale.errors import DataError


def expand_shards(patterns: str | Sequence[str], name: str = "train") -> list[Path]:
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


def _expand(pattern: str, name: str) -> Iterator[Path]:
    if not pattern:
        raise DataError(
            f"{name} contains an empty pattern; give a path such as 'shards/{name}-{{000000..000015}}.tar'."
        )
    from braceexpand import braceexpand

    try:
        texts = list(braceexpand(pattern))
    except ValueError:  # the package's own UnbalancedBracesError
        raise DataError(f"{name}={pattern!r} has unbalanced braces; write a range as {{000000..000015}}.") from None
    for text in texts:
        if glob.has_magic(text):
            found = sorted(Path(path) for path in glob.glob(text, recursive=True))
        elif Path(text).is_dir():
            found = sorted(Path(text).glob("*.tar"))
        else:
            found = [Path(text)] if Path(text).is_file() else []
        if not found:
            of = "" if text == pattern else f" (from {name}={pattern!r})"
            raise DataError(f"No shard at {text!r}{of} in {Path.cwd()}; check the path, or write shards first.")
        yield from found
