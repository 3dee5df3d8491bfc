"""Callbacks that work with every strategy."""

from lightning_llmscale.callbacks.chaos import Chaos

__all__ = ["Chaos"]
