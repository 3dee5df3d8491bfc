"""Real text that every machine has: the sources of Python's own standard library, packed into WebDataset shards."""

from __future__ import annotations

__all__ = ["Corpus", "order0_entropy", "pack_standard_library", "standard_library_sources"]

import hashlib
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_llmscale.data import pack_text_files

_VALIDATION_SHARE = 64  # one file in so many is held out
_SHARD_BYTES = 1 << 20
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_RECORD = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """What was packed."""

    folder: str
    """Folder of the shards ``train-*.tar`` and ``val-*.tar``."""
    files: int
    """Number of documents."""
    train_bytes: int
    """Bytes of text to train on."""
    val_bytes: int
    """Bytes of text held out."""
    entropy: float
    """Order-0 entropy of the training text in bits per byte: what a model that knows only byte frequencies needs."""
    sources: str
    """Digest of the packed paths and sizes, to tell whether the folder is still this Python's library."""


def standard_library_sources() -> dict[str, Path]:
    """Returns the UTF-8 Python files of the standard library without its tests, by relative path, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and _is_text(path):
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def is_validation(name: str) -> bool:
    """Returns whether a document is held out: decided by its name alone, so the split never moves."""
    return hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_SHARE == 0


def order0_entropy(texts: Iterable[bytes]) -> float:
    """Returns the Shannon entropy of the byte frequencies of `texts`, in bits per byte (0 for no text)."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    total = counts.total()
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def pack_standard_library(folder: Path) -> Corpus:
    """Packs the standard library into shards, or returns what a complete earlier run packed.

    Args:
        folder: Where the shards go; a folder that an interrupted run left incomplete is packed again.

    Returns:
        The description of the corpus, which is also kept in the folder.
    """
    sources = standard_library_sources()
    digest = _digest(sources)
    record = folder / _RECORD
    if record.is_file():
        corpus = Corpus(**json.loads(record.read_text()))
        if corpus.sources == digest and corpus.folder == str(folder):
            return corpus
        record.unlink()
    train = {name: path for name, path in sources.items() if not is_validation(name)}
    held_out = {name: path for name, path in sources.items() if is_validation(name)}
    for stale in folder.glob("*.tar*"):
        stale.unlink()
    for split, files in (("train", train), ("val", held_out)):
        pack_text_files(
            _with_progress(list(files.values()), f"Packing {split}"),
            str(folder / f"{split}-%06d.tar"),
            shard_bytes=_SHARD_BYTES,
        )
    corpus = Corpus(
        folder=str(folder),
        files=len(sources),
        train_bytes=_total(train),
        val_bytes=_total(held_out),
        entropy=order0_entropy(path.read_bytes() for path in train.values()),
        sources=digest,
    )
    partial = record.with_suffix(".part")
    partial.write_text(json.dumps(asdict(corpus), indent=2))
    partial.replace(record)  # the record appears last and whole: its presence means the shards are complete
    return corpus


def _total(files: dict[str, Path]) -> int:
    return sum(path.stat().st_size for path in files.values())


def _digest(sources: dict[str, Path]) -> str:
    listing = "\n".join(f"{name} {path.stat().st_size}" for name, path in sources.items())
    return hashlib.sha256(listing.encode()).hexdigest()


def _with_progress(paths: list[Path], title: str) -> Iterable[Path]:
    from rich.progress import track

    return track(paths, description=title)
