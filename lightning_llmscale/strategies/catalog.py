"""The strategies of this package: what each is for, and what each refuses.

A newcomer adds an entry; the conformance tests then demand of it that every feature either works or is refused with the
message given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

__all__ = ["STRATEGIES", "StrategyEntry"]


@dataclass(frozen=True)
class StrategyEntry:
    """One strategy of the catalogue."""

    name: str
    """Name for ``Trainer(strategy=name)``, lower case."""
    class_path: str
    """Import path for YAML files."""
    summary: str
    """One line: when to use it."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Lightning features it cannot honour, by name, with the message that a user gets."""

    def load(self) -> type[Any]:
        """Import the class."""
        module, _, name = self.class_path.rpartition(".")
        loaded: type[Any] = getattr(import_module(module), name)
        return loaded


STRATEGIES: dict[str, StrategyEntry] = {
    entry.name: entry
    for entry in (
        StrategyEntry(
            name="ring_allreduce",
            class_path="lightning_llmscale.RingAllReduceStrategy",
            summary=(
                "The model fits on each device: one CPU host, slow links, or a dead peer that must be known at once."
            ),
            refuses={
                "sync_batchnorm_cpu": (
                    "sync_batchnorm=True cannot take effect on CPU: torch has SyncBatchNorm for GPUs only; "
                    "drop the option, or freeze the statistics of the BatchNorm layers"
                ),
                "batch_size_finder": "The Batch size finder is not supported with distributed strategies.",
                "skipped_steps": (
                    "Skipping the `training_step` by returning None in distributed training is not supported."
                ),
            },
        ),
    )
}
"""Every strategy by name."""
