"""Picks the command that `llmscale` or `python -m lightning_llmscale` was asked for, and reports its errors."""

from __future__ import annotations

__all__ = ["COMMANDS", "main"]

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lightning_llmscale.cli.messages import did_you_mean
from lightning_llmscale.cli.reporting import fail, report_errors


class Command(NamedTuple):
    """A command: what it does in a few words, and the module whose ``run(args)`` does it (imported when asked for)."""

    summary: str
    module: str


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "train a small GPT on Python's own sources, two processes, a few minutes", "lightning_llmscale.cli.demo"
    ),
    "fit": Command("train your LightningModule from a YAML file", "lightning_llmscale.cli.training"),
    "validate": Command("run the validation loop", "lightning_llmscale.cli.training"),
    "test": Command("run the test loop", "lightning_llmscale.cli.training"),
    "predict": Command("run the prediction loop", "lightning_llmscale.cli.training"),
    "verify": Command(
        "prove that a strategy computes what one plain process computes", "lightning_llmscale.cli.verify"
    ),
    "data": Command("pack, index, verify and inspect WebDataset shards", "lightning_llmscale.cli.data"),
    "strategies": Command(
        "list the strategies: when to use each, what it refuses", "lightning_llmscale.cli.strategies"
    ),
}

_EXAMPLES = """\
examples:
  llmscale demo
  llmscale fit --config run.yaml
  llmscale fit --config run.yaml --trainer.strategy=RingAllReduceStrategy --trainer.devices=2
  llmscale fit --config run.yaml --print_config
  llmscale verify --config run.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; `sys.argv` when ``None``.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the command line or the configuration is wrong.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in args:
        args.remove("--debug")
        os.environ["LLMSCALE_DEBUG"] = "1"  # by environment, so that every launched process sees it
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        print(_version())
        return 0
    name = args[0]
    if name not in COMMANDS:
        return fail(f"there is no command {name!r}{did_you_mean(name, list(COMMANDS))}")
    # a console script puts its own folder first on the path; the user's modules lie where the command is typed
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with report_errors() as outcome:
        command = importlib.import_module(COMMANDS[name].module)
        outcome.code = command.run(args if COMMANDS[name].module == "lightning_llmscale.cli.training" else args[1:])
    return outcome.code


def _help() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: llmscale COMMAND [OPTIONS] [--debug]\n\n"
        "Train an LLM at scale with PyTorch Lightning by changing one Trainer argument.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "options:\n"
        "  --help      this text; after a command: its options\n"
        "  --version   versions of llmscale, Lightning and torch\n"
        "  --debug     full traceback of an error (also LLMSCALE_DEBUG=1)\n\n" + _EXAMPLES
    )


def _version() -> str:
    from importlib.metadata import version

    return (
        f"llmscale {version('lightning-llmscale')} (lightning {version('lightning')}, torch {version('torch')}, "
        f"python {sys.version.split()[0]})"
    )
