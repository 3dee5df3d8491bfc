"""Train an LLM at scale with PyTorch Lightning by changing one Trainer argument.

Importing the package makes its strategies known to ``Trainer(strategy="ring_allreduce")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_llmscale.strategies import RingAllReduceStrategy, register_strategies

if TYPE_CHECKING:
    from lightning_llmscale.data import WebDatasetDataModule

__all__ = ["RingAllReduceStrategy", "WebDatasetDataModule", "__version__"]

__version__ = "0.1.0.dev0"

register_strategies()


def __getattr__(name: str) -> Any:
    # loaded on first use, so that a script that only wants a strategy does not pay for the data path
    if name == "WebDatasetDataModule":
        from lightning_llmscale.data import WebDatasetDataModule

        return WebDatasetDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
