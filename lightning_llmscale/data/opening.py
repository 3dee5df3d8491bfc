"""Open the data of a split as a source of items, by the options of the DataModule."""

from __future__ import annotations

__all__ = ["Packing", "SourceOptions", "open_shards"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_llmscale.data.cache import ShardCache, parse_bytes
from lightning_llmscale.data.processing import Processing
from lightning_llmscale.data.reader import ShardReader
from lightning_llmscale.data.remote import Fetcher, is_compressed, is_remote
from lightning_llmscale.data.sequences import ConcatSource, PackedSource, PaddedSource
from lightning_llmscale.data.shards import expand_shards
from lightning_llmscale.data.sources import SampleSource, Source
from lightning_llmscale.data.tokens import TokenReader

Packing = Literal["none", "concat", "best_fit"]

_SOURCES: dict[str, Callable[..., Source]] = {
    "concat": ConcatSource,
    "best_fit": PackedSource,
    "none": PaddedSource,
}
_OPEN_LOCAL = 512  # maps are cheap; indexes of that many shards of 10,000 samples take some 200 MB


@dataclass(frozen=True)
class SourceOptions:
    """What all splits of a DataModule share; see its arguments."""

    seed: int
    seq_len: int | None
    tokens: TokenReader | None
    packing: Packing
    text_key: str
    document_ids: bool
    processing: Processing
    cache_dir: str | None
    cache_limit: str
    storage_options: dict[str, Any] | None

    @property
    def unit(self) -> str:
        """What an item is called in messages."""
        return "samples" if self.seq_len is None else f"sequences of {self.seq_len} tokens"

    def open(self, name: str, patterns: str | Sequence[str], in_use: int) -> Source:
        """Find the shards of a split and read or make their indexes.

        Args:
            name: The split, for error messages.
            patterns: Its shards.
            in_use: Shards that a process keeps open at a time; shards in the cache cannot be evicted while they are.
        """
        reader = open_shards(
            expand_shards(patterns, name),
            cache_dir=self.cache_dir,
            cache_limit=self.cache_limit,
            storage_options=self.storage_options,
            tolerant=self.processing.on_bad == "skip",
            in_use=in_use,
        )
        if self.seq_len is None:
            return SampleSource(reader, self.seed, self.processing)
        make = _SOURCES[self.packing]
        return make(reader, self.seed, self.seq_len, self.tokens, self.text_key, self.document_ids, name)


def open_shards(
    shards: Sequence[str],
    *,
    cache_dir: str | None = None,
    cache_limit: str = "200GB",
    storage_options: dict[str, Any] | None = None,
    tolerant: bool = False,
    in_use: int = 8,
) -> ShardReader:
    """Make a reader of shards, with a cache where some are remote or compressed.

    Args:
        shards: Paths and URLs.
        cache_dir: Folder of the cache; ``~/.cache/lightning_llmscale`` when ``None``.
        cache_limit: Bytes that the cache may hold.
        storage_options: Options of fsspec.
        tolerant: Read damaged shards as far as they go.
        in_use: Shards of the cache to keep open at a time.
    """
    cache = fetcher = None
    if any(is_remote(shard) or is_compressed(shard) for shard in shards):
        folder = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "lightning_llmscale"
        cache, fetcher = ShardCache(folder, parse_bytes("cache_limit", cache_limit)), Fetcher(storage_options)
    return ShardReader(shards, cache, fetcher, tolerant, in_use if cache else _OPEN_LOCAL)
