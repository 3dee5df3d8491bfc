"""`llmscale verify`: builds what `llmscale fit` would run with the same options, and hands it to the verification."""

from __future__ import annotations

__all__ = ["build", "run"]

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_llmscale.cli.strategy_names import import_named_classes
from lightning_llmscale.cli.training import LlmscaleCLI


class _BuildsOnly(LlmscaleCLI):
    """`llmscale fit` up to the point where training would begin.

    Args:
        argv: Options of `llmscale fit`.
        trainer_options: Arguments of the Trainer that replace the configured ones.
    """

    def __init__(self, argv: Sequence[str], trainer_options: Mapping[str, Any]) -> None:
        self._trainer_options = trainer_options
        super().__init__(["fit", *argv])

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(**{**kwargs, **self._trainer_options})

    def fit(self, **kwargs: Any) -> None:
        """Stands in for ``Trainer.fit``; LightningCLI prefers a method of its own name."""


def build(arguments: Sequence[str], trainer_options: Mapping[str, Any]) -> _BuildsOnly:
    """Builds trainer, module and data from the options of `llmscale fit`; see ``verification.Build``."""
    import_named_classes()
    return _BuildsOnly(arguments, trainer_options)


def run(args: list[str]) -> int:
    """Runs ``llmscale verify ARGS``.

    Returns:
        0 equal, 1 different, 2 not comparable.
    """
    from lightning_llmscale.verification.cli import run as verify

    return verify(args, build)
