"""The reference: plain Lightning in one process, trained on the batches that all ranks together were given."""

from __future__ import annotations

__all__ = ["RecordedBatches", "StartFrom", "loss_factors", "record", "replay"]

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification.batches import JOIN_HOOK, join_batches
from lightning_llmscale.verification.isolation import Runnable, isolate, replace
from lightning_llmscale.verification.recorder import Recorder
from lightning_llmscale.verification.recording import BatchRecord, RankReader, read_ranks, read_replicas
from lightning_llmscale.verification.settings import Settings


def record(run: Runnable, folder: Path, settings: Settings) -> None:
    """Trains a run as configured and records it; every rank calls this.

    Args:
        run: Built with the Trainer arguments of :func:`~.isolation.strategy_options`.
        folder: Folder of the recording, the same on all ranks.
        settings: Steps, optimizer, dropout.

    Raises:
        ConfigurationError: If the run spans several machines or its module draws batches by itself.
    """
    if run.trainer.num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={run.trainer.num_nodes}: verify runs on this machine alone; pass --trainer.num_nodes=1."
        )
    if "dataloader_iter" in inspect.signature(run.model.training_step).parameters:
        raise ConfigurationError(
            f"{type(run.model).__name__}.training_step takes a dataloader_iter, so verify cannot give it the same "
            "batches twice; let it take `batch` while verifying."
        )
    recorder = Recorder(folder, settings.steps, keep_dropout=settings.keep_dropout, keep_batches=True)
    isolate(run, settings, [recorder])
    run.trainer.fit(run.model, datamodule=run.datamodule)


def replay(run: Runnable, recorded: Path, folder: Path, settings: Settings, *, seed: int | None = None) -> None:
    """Trains the module in this one process from the recorded start on the recorded batches, and records that.

    Args:
        run: Built with the Trainer arguments of :func:`~.isolation.plain_options`.
        recorded: Recording of the run under the strategy.
        folder: Folder of the new recording.
        settings: The same as for the recorded run.
        seed: Random state for the training, to see whether the module depends on it; `None` leaves it alone.

    Raises:
        ConfigurationError: If nothing was recorded or the batches of the ranks cannot be joined.
    """
    batches = RecordedBatches(read_replicas(recorded), run.trainer, getattr(run.model, JOIN_HOOK, join_batches))
    recorder = Recorder(folder, settings.steps, keep_dropout=settings.keep_dropout, keep_batches=False)
    isolate(run, settings, [StartFrom(recorded, seed), recorder])
    for owner in (run.model, run.datamodule):
        if owner is not None:  # the recorded batches have been through these hooks
            replace(owner, "on_before_batch_transfer", _unchanged)
            replace(owner, "on_after_batch_transfer", _unchanged)
    replace(run.model if run.datamodule is None else run.datamodule, "train_dataloader", partial(_give, batches))
    factors = loss_factors(batches.records, run.trainer.accumulate_grad_batches)
    if run.model.automatic_optimization and any(factor != 1.0 for factor in factors):
        replace(run.model, "backward", partial(_weighted_backward, run.model.backward, recorder, factors))
    run.trainer.fit(run.model, datamodule=run.datamodule)


class RecordedBatches:
    """A training loader that gives the joined batches of all replicas, epoch by epoch as they were recorded.

    Args:
        replicas: Recording of one rank of each data replica.
        trainer: The trainer that will use the loader; its epoch decides which batches come.
        join: Makes one batch of those of the replicas.

    Attributes:
        records: For each batch in order, the records of the replicas that had it.
    """

    def __init__(self, replicas: Sequence[RankReader], trainer: Trainer, join: Callable[[list[Any]], Any]) -> None:
        self._replicas = replicas
        self._trainer = trainer
        self._join = join
        count = max(len(replica.batches) for replica in replicas)
        if count == 0:
            raise ConfigurationError("the run under the strategy trained on no batch: its training data is empty.")
        self.records = [[r.batches[i] for r in replicas if i < len(r.batches)] for i in range(count)]

    def __iter__(self) -> Iterator[Any]:
        epoch = self._trainer.current_epoch
        for index, records in enumerate(self.records):
            if records[0].epoch == epoch:
                holders = [r for r in self._replicas if index < len(r.batches) and r.batches[index].samples]
                yield self._join([holder.batch(index) for holder in holders or self._replicas[:1]])

    def __len__(self) -> int:
        """Batches of a full epoch, also where the recording ends earlier: the user's schedule may ask for it."""
        length = self._replicas[0].info.epoch_batches
        if length is None:
            raise TypeError("the recorded loader had no length")
        return length


class StartFrom(Callback):
    """Gives the module, before its first step, the parameters and buffers that a recorded run had then.

    Args:
        recorded: The recorded run; of its ranks, the first that holds a tensor is read.
        seed: Random state from then on; `None` leaves it alone.
    """

    def __init__(self, recorded: Path, seed: int | None = None) -> None:
        self._recorded = recorded
        self._seed = seed
        self._done = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._done:
            self._done = True
            self._load(pl_module)
            if self._seed is not None:
                seed_everything(self._seed, verbose=False)

    def _load(self, pl_module: LightningModule) -> None:
        tensors = {
            **dict(pl_module.named_parameters(remove_duplicate=False)),
            **dict(pl_module.named_buffers(remove_duplicate=False)),
        }
        for rank in reversed(read_ranks(self._recorded)):
            start = rank.state("start")
            for name, value in {**start.parameters, **start.buffers}.items():
                if name in tensors:
                    _copy(name, value, tensors[name])


@torch.no_grad()
def _copy(name: str, value: Tensor, target: Tensor) -> None:
    if value.shape != target.shape:
        raise ConfigurationError(
            f"{name} has the shape {tuple(value.shape)} under the strategy and {tuple(target.shape)} in the plain run, "
            "so the two cannot be compared: build the same module in both."
        )
    target.copy_(value)


def loss_factors(records: Sequence[Sequence[BatchRecord]], accumulate: int) -> list[float]:
    """What each batch's loss is multiplied by, so that an optimizer step sees the mean by declared weights.

    Lightning divides each loss by ``accumulate``. That is right for plain means; a module that returns a
    ``loss_weight`` asks for the weighted mean over all batches of a step, however many they are.

    Args:
        records: For each batch, the records of the replicas.
        accumulate: Batches per optimizer step.

    Returns:
        One factor per batch; all are 1 if the module declares no weights.
    """
    if any(record.weight is None for replicas in records for record in replicas):
        return [1.0] * len(records)
    weights = [sum(record.share for record in replicas) for replicas in records]
    factors: list[float] = []
    for _, window in groupby(range(len(records)), key=lambda index: records[index][0].step):
        members = list(window)
        total = sum(weights[index] for index in members)
        factors += [accumulate * weights[index] / total if total else 0.0 for index in members]
    return factors


def _weighted_backward(
    backward: Callable[..., None], recorder: Recorder, factors: Sequence[float], loss: Tensor, *args: Any
) -> None:
    backward(loss * factors[recorder.batches_done], *args)


def _unchanged(batch: Any, dataloader_idx: int) -> Any:
    return batch


def _give(loader: RecordedBatches) -> RecordedBatches:
    return loader
