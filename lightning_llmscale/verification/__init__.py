"""Proof that a strategy computes what one plain Lightning process computes.

``record`` trains a run under its strategy and keeps its start, batches, losses, gradients and end; ``replay`` trains
the same module in one plain process from the same start on the same batches; ``compare`` reports the largest
differences and the first. ``verify`` does all three in processes of its own and is what ``llmscale verify`` runs.
"""

from lightning_llmscale.verification.compare import compare
from lightning_llmscale.verification.isolation import Build, Runnable, plain_options, strategy_options
from lightning_llmscale.verification.replay import record, replay
from lightning_llmscale.verification.report import Finding, Largest, Report
from lightning_llmscale.verification.settings import Settings
from lightning_llmscale.verification.verify import verify

__all__ = [
    "Build",
    "Finding",
    "Largest",
    "Report",
    "Runnable",
    "Settings",
    "compare",
    "plain_options",
    "record",
    "replay",
    "strategy_options",
    "verify",
]
