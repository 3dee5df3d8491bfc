"""Data at any size: WebDataset shards, shuffled, batched and resumed to the exact sample."""

from __future__ import annotations

__all__ = ["WebDatasetDataModule", "pack_text_files"]

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llmscale.data.datamodule import WebDatasetDataModule
    from lightning_llmscale.data.writer import pack_text_files

_HOME = {"WebDatasetDataModule": "datamodule", "pack_text_files": "writer"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
