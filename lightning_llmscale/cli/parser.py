"""The argument parser behind every `llmscale` command: Lightning's, with short errors and no silent abbreviations."""

from __future__ import annotations

__all__ = ["LlmscaleParser"]

import os
import sys
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_llmscale.cli.messages import explain


class LlmscaleParser(LightningArgumentParser):
    """`LightningArgumentParser` that refuses a mistake in one sentence and with exit code 2.

    jsonargparse builds a parser of the same class for the options of every class it meets, so the suggestions below
    also know the options of a strategy, a model or a callback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # argparse would take --trainer.max_step for --trainer.max_steps and nobody would notice
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def option_names(self) -> list[str]:
        """Returns the dotted name of every option this parser and its subcommands accept."""
        names: list[str] = []
        for action in self._actions:
            names += [option.lstrip("-") for option in action.option_strings if option.startswith("--")]
            if isinstance(action.choices, dict):
                names += [name for parser in action.choices.values() for name in parser.option_names()]
        hidden = ("help", "print_config", "+")
        return list(dict.fromkeys(name for name in names if not name.endswith(hidden)))

    @override
    def validate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().validate(*args, **kwargs)
        except KeyError as error:
            # Only here is it known which parser, and so which class, does not know the option.
            parser = getattr(error, "subcommand_parser", self)
            error.args = (explain(str(error), parser.option_names()),)
            raise

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        short = explain(message, self.option_names())
        if not self.exit_on_error:
            super().error(short if short.startswith("option '") else message, ex)
        if os.environ.get("LLMSCALE_DEBUG"):
            sys.stderr.write(f"{message}\n")
        sys.stderr.write(f"{self.prog.replace(' [options]', '')}: error: {short}\n")
        self.exit(2)
