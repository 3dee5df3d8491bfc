"""What a run leaves on disk: one folder per rank, written while it trains, read back tensor by tensor."""

from __future__ import annotations

__all__ = ["BatchRecord", "RankInfo", "RankReader", "RankWriter", "State", "read_ranks", "read_replicas"]

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llmscale.errors import ConfigurationError


@dataclass(frozen=True)
class BatchRecord:
    """One call of ``training_step``.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Optimizer steps done before this batch; batches of equal step were accumulated.
        loss: As Lightning reports it (already divided by the accumulation), None where the rank computed none.
        weight: ``loss_weight`` the module returned, None if it returned none.
        samples: Samples in the batch; 0 if it only filled a gap and counts nothing.
    """

    epoch: int
    step: int
    loss: float | None
    weight: float | None
    samples: int

    @property
    def share(self) -> float:
        """What the batch counts in a mean: its ``loss_weight`` or, without one, its samples."""
        return float(self.samples) if self.weight is None else self.weight


@dataclass(frozen=True)
class RankInfo:
    """What a rank knew about the run.

    Attributes:
        replica: Number of the data replica this rank belongs to, of ``replicas``.
        epoch_batches: Batches of a full epoch, None if unknown.
        accumulate: Batches per optimizer step.
        reduced_matmul: Whether fp32 matrix products ran in a shorter format.
        batch_norms: BatchNorm layers that computed statistics of the batch.
        steps: Optimizer steps done.
    """

    rank: int
    world_size: int
    replica: int
    replicas: int
    strategy: str
    precision: str
    accumulate: int
    automatic_optimization: bool
    epoch_batches: int | None
    reduced_matmul: bool
    batch_norms: list[str]
    steps: int


@dataclass(frozen=True)
class State:
    """Parameters and buffers by name (full tensors on the CPU), and which names are one tensor."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    tied: list[list[str]]


class RankWriter:
    """Writes the recording of one rank.

    Args:
        folder: Folder of the run; the rank writes to ``rank<r>`` in it.
        rank: Global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank{rank}"
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        self._batches: list[BatchRecord] = []

    def check_space(self, needed: int) -> None:
        """Refuses to start what cannot be finished.

        Raises:
            ConfigurationError: If the disk has fewer than ``needed`` free bytes.
        """
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ConfigurationError(
                f"the gradients and weights of all steps need {needed / 1e9:.1f} GB in {self.folder.parent}, where "
                f"{free / 1e9:.1f} GB are free: ask for fewer steps or point --keep at another disk."
            )

    def state(self, moment: str, state: State) -> None:
        """Keeps the state of the module at a moment: ``start`` or ``end``."""
        torch.save(dataclasses.asdict(state), self.folder / f"{moment}.pt")

    def batch(self, batch: Any) -> None:
        """Keeps a batch; :meth:`batch_done` follows."""
        torch.save(batch, self.folder / f"batch{len(self._batches):06d}.pt")

    def batch_done(self, record: BatchRecord) -> None:
        """Notes what came of the batch."""
        self._batches.append(record)

    def gradients(self, step: int, gradients: dict[str, Tensor]) -> None:
        """Keeps the gradients of an optimizer step, from 0."""
        unfinished = self.folder / "unfinished"
        torch.save(gradients, unfinished)
        unfinished.rename(self.folder / f"gradients{step:06d}.pt")  # whoever counts these files sees whole ones

    def finish(self, info: RankInfo) -> None:
        """Completes the recording."""
        content = {"info": dataclasses.asdict(info), "batches": [dataclasses.asdict(b) for b in self._batches]}
        (self.folder / "rank.json").write_text(json.dumps(content))


class RankReader:
    """Reads the recording of one rank, one file at a time; tensors are mapped, so that many ranks fit into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        content = json.loads((folder / "rank.json").read_text())
        self.info = RankInfo(**content["info"])
        self.batches = [BatchRecord(**record) for record in content["batches"]]

    def state(self, moment: str) -> State:
        """The state of the module at ``start`` or ``end``."""
        return State(**torch.load(self.folder / f"{moment}.pt", weights_only=True, mmap=True))

    def batch(self, index: int) -> Any:
        """A batch, by its number from 0."""
        # a batch may hold any class of the user's; the file is this run's own
        return torch.load(self.folder / f"batch{index:06d}.pt", weights_only=False)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Gradients of an optimizer step, by its number from 0."""
        return torch.load(self.folder / f"gradients{step:06d}.pt", weights_only=True, mmap=True)

    @property
    def gradient_steps(self) -> int:
        """Recorded optimizer steps; by hand, each optimizer's step counts."""
        return len(list(self.folder.glob("gradients*.pt")))


def read_ranks(folder: Path) -> list[RankReader]:
    """Opens the recordings of all ranks of a run, by rank.

    Raises:
        ConfigurationError: If a rank did not finish its recording.
    """
    readers = sorted(
        map(RankReader, (path.parent for path in folder.glob("rank*/rank.json"))), key=lambda r: r.info.rank
    )
    expected = readers[0].info.world_size if readers else 1
    missing = sorted(set(range(expected)) - {reader.info.rank for reader in readers})
    if missing:
        raise ConfigurationError(f"rank {missing[0]} of {expected} left no complete recording in {folder}.")
    return readers


def read_replicas(folder: Path) -> list[RankReader]:
    """Opens the recording of the lowest rank of each data replica: ranks of one replica were given the same batches."""
    lowest = {reader.info.replica: reader for reader in reversed(read_ranks(folder))}
    return [lowest[replica] for replica in sorted(lowest)]
