"""Fetch shards from any fsspec URL, with ranged reads that continue after a failure; gzip is unpacked."""

from __future__ import annotations

__all__ = ["Fetcher", "is_compressed", "is_remote"]

import os
import random
import time
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lightning_llmscale.data.cache import CacheWriter
from lightning_llmscale.errors import ConfigurationError, DataError

_CHUNK = 16 << 20
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 20.0


def is_remote(shard: str) -> bool:
    """Whether a shard has to be fetched over the network."""
    return "://" in shard and not shard.startswith("file://")


def is_compressed(shard: str) -> bool:
    """Whether a shard has to be unpacked before samples can be found in it."""
    return shard.endswith((".tar.gz", ".tgz"))


class Fetcher:
    """Reads files at fsspec URLs.

    Args:
        options: ``storage_options`` of fsspec.
        tries: Failures in a row, without a byte of progress, after which a transfer is given up.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, tries: int = 8) -> None:
        self._options, self._tries = dict(options or {}), tries
        self._systems: dict[tuple[int, str], Any] = {}

    def fetch(self, url: str, writer: CacheWriter) -> None:
        """Write a shard, unpacked if its name ends in ``.gz`` or ``.tgz``.

        Raises:
            DataError: The file does not exist, may not be read, or the transfer keeps failing.
        """
        if not is_compressed(url):
            for chunk in self._chunks(url, writer):
                writer.write(chunk)
            return
        inflate, ended = zlib.decompressobj(wbits=31), False
        try:
            for chunk in self._chunks(url, None):
                rest = chunk
                while rest:
                    writer.write(inflate.decompress(rest, _CHUNK))
                    rest, ended = inflate.unconsumed_tail, inflate.eof
                    if ended:  # gzip files may be joined
                        rest, inflate = inflate.unused_data, zlib.decompressobj(wbits=31)
        except zlib.error as error:
            raise DataError(f"{url} is damaged: {error}; write or fetch the shard again.") from error
        if not ended:
            raise DataError(f"{url} is truncated: its gzip stream has no end; write or fetch the shard again.")

    def read(self, url: str) -> bytes | None:
        """Return a small file, or None if there is none."""
        try:
            return b"".join(self._chunks(url, None))
        except _MissingError:
            return None

    def write(self, url: str, data: bytes) -> None:
        """Write a small file.

        Raises:
            DataError: The place cannot be written.
        """
        system, path = self._system(url)
        try:
            system.pipe_file(path, data)
        except Exception as error:
            raise DataError(f"{url} cannot be written ({type(error).__name__}: {error}); check credentials.") from error

    def _chunks(self, url: str, writer: CacheWriter | None) -> Iterator[bytes]:
        system, path = self._system(url)
        size = self._attempt(url, lambda: system.info(path)["size"])
        if size is None:
            yield self._attempt(url, lambda: system.cat_file(path))
            return
        if writer is not None:
            writer.expect(size)
        position = 0
        while position < size:
            end = min(size, position + _CHUNK)
            chunk = self._attempt(url, partial(system.cat_file, path, start=position, end=end))
            if not chunk:
                raise DataError(f"{url} ended at byte {position} of {size}; fetch or write the shard again.")
            if len(chunk) > end - position:  # the server ignored the range
                chunk = chunk[position:end]
            position += len(chunk)
            yield chunk

    def _attempt(self, url: str, call: Any) -> Any:
        """Call with increasing waits between failures that may pass."""
        wait = _FIRST_WAIT
        for left in range(self._tries - 1, -1, -1):
            try:
                return call()
            except Exception as error:
                # fsspec's HTTP says "not found" whatever the failure was; the cause tells
                cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
                status = getattr(cause or error, "status", None)
                missing = isinstance(error, FileNotFoundError) and isinstance(cause, (FileNotFoundError, type(None)))
                if missing or status == 404:
                    raise _MissingError(f"{url} does not exist (404); check the address.") from error
                if isinstance(error, PermissionError) or status in (401, 403):
                    raise DataError(f"{url} may not be read (403); check credentials in storage_options.") from error
                if not left:
                    raise DataError(
                        f"{url} could not be fetched in {self._tries} tries, the last failure being "
                        f"{type(cause or error).__name__}: {cause or error}; check the network and the server."
                    ) from error
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(_LONGEST_WAIT, 2 * wait)
        raise AssertionError("unreachable")

    def _system(self, url: str) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        protocol = url.partition("://")[0] if "://" in url else "file"
        key = os.getpid(), protocol  # connections do not survive a fork
        if key not in self._systems:
            try:
                self._systems[key] = fsspec.filesystem(protocol, skip_instance_cache=True, **self._options)
            except (ImportError, ValueError) as error:
                raise ConfigurationError(f"{url} cannot be opened: {error}") from error
        return self._systems[key], self._systems[key]._strip_protocol(url)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_systems": {}}


class _MissingError(DataError):
    pass
