"""`llmscale strategies`: each strategy with one line on when to use it and what it refuses."""

from __future__ import annotations

__all__ = ["run"]

import argparse
import textwrap

from lightning_llmscale.strategies.catalog import STRATEGIES


def run(args: list[str]) -> int:
    """Prints the catalogue.

    Args:
        args: No option but ``--help``.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog="llmscale strategies", description="Lists the strategies: when to use each, and what it refuses."
    )
    parser.parse_args(args)
    for entry in STRATEGIES.values():
        print(f"{entry.name}  ({entry.class_path})")
        print(textwrap.fill(entry.summary, 100, initial_indent="  use it  ", subsequent_indent="          "))
        for feature, message in entry.refuses.items():
            line = f"{feature}: {message}"
            print(textwrap.fill(line, 100, initial_indent="  refuses ", subsequent_indent="          "))
    print("\nIn YAML:  trainer: {strategy: {class_path: CLASS_PATH, init_args: {...}}}")
    print("Options:  llmscale fit --trainer.strategy.help=CLASS_PATH")
    return 0
