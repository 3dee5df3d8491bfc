"""Callbacks that work with every strategy."""

from lightning_llmscale.callbacks.chaos import Chaos
from lightning_llmscale.callbacks.watchdog import HangWatchdog

__all__ = ["Chaos", "HangWatchdog"]
