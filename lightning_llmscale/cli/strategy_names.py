"""Strategies as people write them on a command line: a registered name, a bare class name, or a class path."""

from __future__ import annotations

__all__ = ["check_strategy_name", "import_named_classes", "strategy_config"]

import importlib
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_llmscale.cli.messages import did_you_mean
from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.strategies.catalog import STRATEGIES


def import_named_classes() -> None:
    """Imports the classes that may be named without their module: a parser only finds what was imported."""
    import lightning_llmscale

    for entry in STRATEGIES.values():
        entry.load()
    _ = lightning_llmscale.WebDatasetDataModule  # loaded when first asked for


def check_strategy_name(strategy: object) -> None:
    """Refuses a string that names no strategy; anything else passes.

    Args:
        strategy: The value of ``trainer.strategy`` after parsing.

    Raises:
        ConfigurationError: If no such name is registered and no such class exists, with what exists.
    """
    if not isinstance(strategy, str) or strategy.lower() in _registered_names():
        return
    if "." in strategy:
        _check_class_path(strategy)
        return
    classes = _class_names()
    if strategy in classes:
        return
    # Lightning registers some thirty names; a class name is compared with class names only
    names = classes if strategy != strategy.lower() else [*STRATEGIES, *_registered_names()]
    raise ConfigurationError(f"trainer.strategy={strategy!r} is not known{did_you_mean(strategy, names)}")


def strategy_config(strategy: str) -> str | dict[str, Any]:
    """Returns how a YAML file should say `strategy`: with its class path if it is one of ours or a class.

    Raises:
        ConfigurationError: If there is no such strategy.
    """
    check_strategy_name(strategy)
    for entry in STRATEGIES.values():
        if strategy in (entry.name, entry.class_path.rsplit(".", 1)[-1]):
            return {"class_path": entry.class_path}
    return {"class_path": strategy} if "." in strategy else strategy


def _registered_names() -> list[str]:
    return ["auto", *StrategyRegistry.available_strategies()]


def _class_names() -> list[str]:
    return [entry.class_path.rsplit(".", 1)[-1] for entry in STRATEGIES.values()]


def _check_class_path(path: str) -> None:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"trainer.strategy={path!r} cannot be imported ({error}); check the spelling or install it."
        ) from error
    found = getattr(module, name, None)
    if found is None:
        members = [member for member, value in vars(module).items() if _is_strategy(value)]
        raise ConfigurationError(f"trainer.strategy: {module_name} has no class {name!r}{did_you_mean(name, members)}")
    if not _is_strategy(found):
        raise ConfigurationError(f"trainer.strategy={path!r} is not a strategy; give a class derived from Strategy.")


def _is_strategy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy)
