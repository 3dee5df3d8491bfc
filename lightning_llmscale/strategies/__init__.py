"""Strategies for the Lightning Trainer; one file each."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_llmscale.strategies.catalog import STRATEGIES
from lightning_llmscale.strategies.ring_all_reduce import RingAllReduceStrategy

__all__ = ["STRATEGIES", "RingAllReduceStrategy", "register_strategies"]


def register_strategies() -> None:
    """Make the catalogue's names known to ``Trainer(strategy=name)``; repeated calls change nothing."""
    for entry in STRATEGIES.values():
        variants = {entry.name: "popen", f"{entry.name}_spawn": "spawn", f"{entry.name}_fork": "fork"}
        for name, start_method in variants.items():
            if name not in StrategyRegistry:
                StrategyRegistry.register(
                    name, entry.load(), description=f"{entry.summary} (start_method={start_method!r})",
                    start_method=start_method,
                )  # fmt: skip
