"""The outcome of a verification: what differs most, what differs first, in words, as a table and as JSON."""

from __future__ import annotations

__all__ = ["Finding", "Largest", "Quantity", "Report"]

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

Quantity = Literal["start", "steps", "loss", "gradients", "weights", "buffers", "tying", "between ranks"]

_ROWS: tuple[tuple[Quantity, str], ...] = (
    ("start", "start"),
    ("loss", "loss"),
    ("gradients", "gradients"),
    ("weights", "weights"),
    ("buffers", "buffers"),
    ("between ranks", "between ranks"),
)


@dataclass(frozen=True)
class Largest:
    """The largest relative difference of one quantity and where it was met.

    Attributes:
        name: Parameter or buffer; empty for a loss.
        step: Optimizer step from 0; None for start and end.
        rank: Rank that showed it; None for a loss, which is a mean over the ranks.
    """

    difference: float
    name: str = ""
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Finding:
    """One difference beyond the tolerance.

    Attributes:
        text: What differs, as the beginning of a sentence.
        difference: Relative; infinite where something is missing.
        step: Optimizer step from 0.
        ranks: Those that differ from the plain run.
    """

    quantity: Quantity
    text: str
    difference: float = math.inf
    name: str = ""
    step: int | None = None
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What :func:`~.compare.compare` found.

    Attributes:
        strategy: Class name of the strategy.
        ranks: Processes it ran on.
        replicas: Data replicas among them.
        steps: Optimizer steps of the plain run.
        largest: Largest difference of each quantity that exists.
        findings: All differences beyond the tolerance, in the order of the training; empty if the runs are equal.
        tied: Groups of names that are one tensor in the plain run.
        buffers: Number of buffers.
        hints: Sentences that explain the findings.
    """

    strategy: str
    ranks: int
    replicas: int
    steps: int
    optimizer: str
    precision: str
    tolerance: float
    largest: dict[Quantity, Largest]
    findings: list[Finding]
    tied: list[list[str]]
    buffers: int
    hints: list[str]

    @property
    def passed(self) -> bool:
        """Whether no difference is beyond the tolerance."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first difference in the order of the training."""
        return self.findings[0] if self.findings else None

    @property
    def verdict(self) -> str:
        """One sentence: equal, or what differs first and by how much."""
        where = f"{self.strategy} on {_count(self.ranks, 'process', 'processes')}"
        if self.first is None:
            return (
                f"Equal within {self.tolerance:.0e}: {_count(self.steps, 'step', 'steps')} under {where} give what one "
                "plain process gives."
            )
        ranks = self.first.ranks
        on = "" if not ranks else f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {_listed(ranks)}"
        size = self.first.difference
        by = f": a relative difference of {size:.1e}, tolerance {self.tolerance:.0e}" if math.isfinite(size) else ""
        return f"Different under {where}: {self.first.text}{on}{by}."

    def table(self) -> str:
        """The report as text for a terminal of 80 columns or more."""
        lines = [
            f"{self.strategy}, {_count(self.ranks, 'process', 'processes')}, against one plain process: "
            f"{_count(self.steps, 'step', 'steps')}, {self.optimizer}, precision {self.precision}",
            "",
            f"  {'':<15}{'largest difference':<20}where",
        ]
        for quantity, label in _ROWS:
            largest = self.largest.get(quantity)
            if largest is not None:
                mark = " " if largest.difference <= self.tolerance else "!"
                lines.append(f"{mark} {label:<15}{_size(largest.difference):<20}{_place(largest)}")
        if self.tied:
            untied = next((finding for finding in self.findings if finding.quantity == "tying"), None)
            kept = "kept" if untied is None else "broken"
            lines.append(f"{' ' if untied is None else '!'} {'tied weights':<15}{kept:<20}{' = '.join(self.tied[0])}")
        lines += ["", self.verdict, *self.hints]
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; an infinite difference is the string ``"inf"``."""
        content = {"passed": self.passed, "verdict": self.verdict, **dataclasses.asdict(self)}
        finite: dict[str, Any] = _jsonable(content)
        return finite


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_jsonable(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _listed(ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _size(value: float) -> str:
    return "none" if value == 0 else f"{value:.1e}"


def _place(largest: Largest) -> str:
    if largest.difference == 0:
        return ""
    parts = [largest.name] if largest.name else []
    parts += [f"step {largest.step + 1}"] if largest.step is not None else []
    parts += [f"rank {largest.rank}"] if largest.rank is not None else []
    return ", ".join(parts)
