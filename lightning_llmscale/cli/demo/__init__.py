"""`llmscale demo`: the main road in a few minutes, on real text that every machine has."""

from lightning_llmscale.cli.demo.command import run

__all__ = ["run"]
