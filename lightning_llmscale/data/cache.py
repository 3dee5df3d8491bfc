"""A cache of shards on the disk of a node, shared by its processes without a server.

* A shard's name in the cache is a hash of its whole URL; shards of two datasets never meet.
* One process downloads a shard, others wait for it (a lock file for each shard).
* Room is taken on the disk *before* bytes arrive, by growing the partial file under a lock, so the limit is never
exceeded.
* A shard appears under its name when it is complete and verified.
* A reader pins a shard by a shared lock on it; the least recently used of the others are evicted.

All locks are ``flock``: the kernel drops those of a killed process, and the next one removes its partial files.
"""

from __future__ import annotations

__all__ = ["CacheWriter", "ShardCache", "parse_bytes"]

import errno
import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_llmscale.errors import ConfigurationError, DataError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(option: str, text: str | int) -> int:
    """Parse a size such as ``"200GB"``.

    Raises:
        ConfigurationError: Not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(text).strip().upper())
    if match is None or (match[2] or "B").rstrip("B") + "B" not in {*_UNITS, "B"}:
        raise ConfigurationError(f"{option}={text!r} is not a size; write for example '200GB'.")
    unit = match[2].rstrip("B")
    return int(float(match[1]) * _UNITS[f"{unit}B" if unit else ""])


class CacheWriter:
    """Writes one shard into the cache.

    Args:
        cache: The cache.
        file: Open descriptor of the partial file.
    """

    def __init__(self, cache: ShardCache, file: int) -> None:
        self._cache, self._file = cache, file
        self.written = 0
        self._room = 0

    def expect(self, size: int) -> None:
        """Take room for the whole shard.

        Raises:
            DataError: It does not fit, even when all that is not in use is evicted.
        """
        if size > self._room:
            self._cache.take_room(self._file, size)
            self._room = size

    def write(self, data: bytes) -> None:
        """Append bytes, taking more room where the size was not known."""
        if self.written + len(data) > self._room:
            self.expect(max(self.written + len(data), self._room + self._cache.limit // 64))
        view = memoryview(data)
        while view:
            count = os.pwrite(self._file, view, self.written)
            self.written += count
            view = view[count:]

    def finish(self) -> None:
        """Give back room that was not needed."""
        os.ftruncate(self._file, self.written)
        os.fsync(self._file)


class ShardCache:
    """See the module's docstring.

    Args:
        root: Folder on a local disk; ``flock`` must work there, as it does on local file systems.
        limit: Bytes of shards that it may hold.
        wait: Seconds to wait for room that other processes hold in use.
    """

    def __init__(self, root: Path, limit: int, wait: float = 300.0) -> None:
        self.root, self.limit, self._wait = root, limit, wait
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"The cache folder {root} cannot be made: {error.strerror}; give another cache_dir."
            ) from error

    def path(self, url: str) -> Path:
        """Place of a shard in the cache."""
        return self.root / f"{hashlib.sha256(url.encode()).hexdigest()[:40]}.tar"

    def pin(self, url: str, fetch: Callable[[CacheWriter], None], verify: Callable[[Path], None]) -> tuple[Path, int]:
        """Return the path of a shard and a descriptor that keeps it from being evicted until it is closed.

        Args:
            url: Address of the shard.
            fetch: Writes the shard, when it is not in the cache.
            verify: Raises when the file at a path is not the whole shard.

        Raises:
            DataError: The shard does not fit, the disk is full, or what ``fetch`` and ``verify`` raise.
        """
        path = self.path(url)
        while True:
            file = self._pin_present(path)
            if file is not None:
                return path, file
            with self._locked(path.with_suffix(".lock")):
                if not path.exists():
                    self._download(path, url, fetch, verify)

    def contains(self, url: str) -> bool:
        """Whether a shard is in the cache at this moment."""
        return self.path(url).exists()

    def _pin_present(self, path: Path) -> int | None:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink == 0:  # evicted between the two calls
            os.close(file)
            return None
        os.utime(path)
        return file

    def _download(
        self, path: Path, url: str, fetch: Callable[[CacheWriter], None], verify: Callable[[Path], None]
    ) -> None:
        partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}.part")
        with self._locked(self.root / "space.lock"):
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            fcntl.flock(file, fcntl.LOCK_EX)  # tells it from the leftover of a killed process
        try:
            writer = CacheWriter(self, file)
            fetch(writer)
            writer.finish()
            verify(partial)
            with self._locked(self.root / "space.lock"):  # else whoever adds up sizes may count both names
                partial.replace(path)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DataError(
                    f"The disk of the cache {self.root} is full while it fetches {url}; free some space, or give "
                    f"another cache_dir."
                ) from error
            raise
        finally:
            partial.unlink(missing_ok=True)
            os.close(file)

    def take_room(self, file: int, size: int) -> None:
        """Grow a partial file to ``size`` bytes, evicting what is not in use.

        Raises:
            DataError: There is not that much room within the limit.
        """
        deadline = time.monotonic() + self._wait
        while True:
            with self._locked(self.root / "space.lock"):
                need = size - os.fstat(file).st_size
                if self._evict(self.limit - need):
                    os.posix_fallocate(file, 0, size)
                    return
            if size > self.limit or time.monotonic() > deadline:
                raise DataError(
                    f"The cache {self.root} has no room for a shard of {size} bytes: cache_limit is {self.limit} bytes "
                    f"and what is in use cannot be evicted; raise cache_limit, or lower lanes or window."
                )
            time.sleep(0.05)

    def _evict(self, most: int) -> bool:
        """Remove shards until at most ``most`` bytes are left; returns whether that was possible."""
        entries = []
        for path in self.root.iterdir():
            if path.suffix == ".part" and _unused(path):
                path.unlink(missing_ok=True)  # its process is gone
            elif path.suffix in (".tar", ".part"):
                try:
                    entries.append((path.stat(), path))
                except FileNotFoundError:
                    continue  # a download ended in between
        total = sum(stat.st_size for stat, _ in entries)
        for stat, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
            if total <= most:
                break
            if path.suffix == ".tar" and _unused(path):
                path.unlink(missing_ok=True)
                total -= stat.st_size
        return total <= most

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _unused(path: Path) -> bool:
    """Whether no process holds a lock on a file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(file)
