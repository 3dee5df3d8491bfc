"""What happens to a sample between its bytes and the batch: decoding, filtering, transforms, and what is done if bad.

A sample that is rejected while training is *replaced* by another of the same shard, drawn by a hash of (seed, epoch,
shard, sample, attempt). So every batch keeps its size on every rank, and a resumed run draws the same replacements.
Validation and test leave it out.
"""

from __future__ import annotations

__all__ = ["BadSamples", "OnBad", "PipelineStage", "Processing"]

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_llmscale.data.decoding import Decoder
from lightning_llmscale.data.reader import OpenShard
from lightning_llmscale.errors import ConfigurationError, DataError

log = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]
PipelineStage = Callable[[Iterator[Any]], Iterable[Any]]

_SHOWN = 5


@dataclass
class Processing:
    """Steps from the members of a sample to an item of a batch."""

    members: Sequence[str] | None = None
    """Extensions to read; all when ``None``."""
    trusted: bool = False
    """Whether pickles are loaded."""
    filter: Callable[[dict[str, Any]], bool] | None = None
    """Keeps the samples for which it returns true."""
    transform: Callable[[dict[str, Any]], Any] | None = None
    """Applied to each sample that is kept."""
    pipeline: Sequence[PipelineStage] = ()
    """webdataset filters over the sample stream, instead of decode, filter and transform."""
    on_bad: OnBad = "raise"
    """What a sample that cannot be decoded does."""
    problems: list[str] = field(default_factory=list)
    """Bad samples met and not yet reported, in the process that met them."""

    def __post_init__(self) -> None:
        self._decoder = Decoder(self.trusted, self.members)
        if self.pipeline and (self.filter or self.transform or self.trusted or self.members):
            raise ConfigurationError(
                "pipeline= takes the place of members=, filter=, transform= and trusted=; put them into the pipeline."
            )

    def __call__(self, shard: OpenShard, number: int) -> tuple[bool, Any]:
        """Make an item of a sample.

        Returns:
            Whether the sample is kept, and the item.

        Raises:
            DataError: The sample is bad and ``on_bad="raise"``.
        """
        try:
            if self.pipeline:
                return self._through_pipeline(shard, number)
            sample = self._decoder(shard, number)
        except DataError as error:
            if self.on_bad == "raise":
                raise
            self.problems.append(str(error))
            return False, None
        if self.filter is not None and not self.filter(sample):
            return False, None
        return True, sample if self.transform is None else self.transform(sample)

    def _through_pipeline(self, shard: OpenShard, number: int) -> tuple[bool, Any]:
        sample: dict[str, Any] = {"__key__": shard.key(number), "__url__": shard.name}
        sample |= {name: bytes(raw) for name, raw in shard.members(number).items()}
        stream: Iterator[Any] = iter([sample])
        for stage in self.pipeline:
            stream = iter(stage(stream))
        results = list(stream)
        if len(results) > 1:
            raise ConfigurationError(
                f"pipeline made {len(results)} samples of {sample['__key__']!r}; a stage must give one sample for one, "
                f"or none. Batches and shuffling are the DataModule's."
            )
        return bool(results), results[0] if results else None

    def take_problems(self) -> list[str]:
        """Return and forget the bad samples met."""
        taken, self.problems = self.problems, []
        return taken


class BadSamples:
    """Counts the bad samples of a pass.

    Args:
        most: More than this many end the run.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count, self._first = most, 0, list[str]()

    def add(self, problems: Sequence[str]) -> None:
        """Count bad samples.

        Raises:
            DataError: More were met than are allowed.
        """
        self._count += len(problems)
        self._first += problems[: max(0, _SHOWN - len(self._first))]
        if self._count > self._most:
            raise DataError(
                f"{self._count} bad samples were met on this rank and max_bad={self._most}; repair the data or raise "
                f"max_bad. The first: {self._first[0]}"
            )

    def summarise(self) -> None:
        """Log what was skipped, at the end of a pass."""
        if self._count:
            more = f" and {self._count - len(self._first)} more" if self._count > len(self._first) else ""
            log.warning("skipped %d bad samples on this rank:\n  %s%s", self._count, "\n  ".join(self._first), more)
        self._count, self._first = 0, []
