"""Checks of options: each failure is one sentence with the option, its value and what is possible."""

from __future__ import annotations

__all__ = ["at_least", "one_of", "without_effect"]

from typing import Any, get_args

from lightning_llmscale.errors import ConfigurationError


def at_least(least: int, **options: int | None) -> None:
    """Refuse numbers below ``least``; ``None`` passes."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ConfigurationError(f"{name}={value} is not possible; use a whole number of at least {least}.")


def one_of(choices: Any, **options: str) -> None:
    """Refuse values that are not in a ``Literal``."""
    for name, value in options.items():
        if value not in get_args(choices):
            raise ConfigurationError(f"{name}={value!r} is not possible; use one of {', '.join(get_args(choices))}.")


def without_effect(reason: str, **given: Any) -> None:
    """Refuse options that were given (are true) where they cannot take effect."""
    for name, value in given.items():
        if value:
            raise ConfigurationError(f"{name} has no effect {reason}.")
