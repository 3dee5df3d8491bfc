"""Checks of files and folders that would otherwise fail late, on every rank and after something was written."""

from __future__ import annotations

__all__ = ["check_checkpoint", "check_writable"]

import os
import tempfile
from pathlib import Path

from lightning_llmscale.errors import ConfigurationError

_CHECKPOINT_KEYWORDS = ("best", "last", "hpc", "registry")  # names Lightning resolves itself
_CHECKPOINT_MAGIC = (b"PK", b"\x80")  # a zip file, or a pickle of torch's format before 1.6


def check_writable(option: str, folder: str | os.PathLike[str] | None) -> None:
    """Refuses a folder that cannot be created or written; leaves nothing behind.

    Args:
        option: What the folder was given for, to name it in the message.
        folder: A local path; ``None`` and remote addresses (``s3://...``) pass.

    Raises:
        ConfigurationError: If the folder, or the nearest of its parents that exists, cannot be written.
    """
    if folder is None or "://" in os.fspath(folder):
        return
    parent = Path(folder).absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigurationError(f"{option} {str(folder)!r} is not possible: {parent} is a file; give another folder.")
    try:
        Path(tempfile.mkdtemp(prefix=".llmscale-", dir=parent)).rmdir()
    except OSError as error:
        raise ConfigurationError(
            f"{option} {str(folder)!r} cannot be written ({parent}: {error.strerror}); give another folder."
        ) from error


def check_checkpoint(path: str | os.PathLike[str] | None) -> None:
    """Refuses a checkpoint path that does not exist or is no checkpoint.

    Args:
        path: What was given as ``ckpt_path``; ``None``, Lightning's keywords and remote addresses pass.

    Raises:
        ConfigurationError: If there is no such file or folder, or the file is not one that torch wrote.
    """
    if path is None or str(path).startswith(_CHECKPOINT_KEYWORDS) or "://" in str(path):
        return
    file = Path(path)
    if not file.exists():
        raise ConfigurationError(f"ckpt_path={str(path)!r} does not exist; give the path of a checkpoint.")
    if file.is_dir():
        return
    with file.open("rb") as opened:
        if not opened.read(2).startswith(_CHECKPOINT_MAGIC):
            raise ConfigurationError(f"ckpt_path={str(path)!r} is not a checkpoint that torch wrote.")
