"""The callback that records what a run trains on and what comes out, without changing it."""

from __future__ import annotations

__all__ = ["Recorder", "capture_state"]

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.strategies.base import ScalableStrategy
from lightning_llmscale.verification.batches import sample_count
from lightning_llmscale.verification.dropout import no_dropout
from lightning_llmscale.verification.recording import BatchRecord, RankInfo, RankWriter, State

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Recorder(Callback):
    """Records start and end state, batches, losses and gradients of this rank, and ends the run after some steps.

    Gradients are read right before the optimizer step: reduced over ranks, unscaled, not clipped. Batches are read as
    ``training_step`` gets them, after the batch transfer hooks.

    Args:
        folder: Folder of the run, shared by its ranks.
        steps: Optimizer steps to record.
        keep_dropout: Whether dropout stays on.
        keep_batches: Whether to store the batches.
    """

    def __init__(self, folder: Path, steps: int, *, keep_dropout: bool, keep_batches: bool) -> None:
        self._folder = folder
        self._steps = steps
        self._keep_batches = keep_batches
        self._keep_dropout = keep_dropout
        self._entered: ExitStack | None = None
        self._writer: RankWriter | None = None
        self._batch_norms: list[str] = []
        self._started = False
        self._samples = 0
        self._step = 0
        self._gradient_steps = 0
        self._batches_done = 0

    @property
    def batches_done(self) -> int:
        """Batches of which the training step and the optimizer step have ended."""
        return self._batches_done

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._writer = RankWriter(self._folder, trainer.global_rank)
        if not self._keep_dropout:
            self._entered = ExitStack()
            self._entered.enter_context(no_dropout(pl_module))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._started:
            self._start(trainer, pl_module)
        self._step = trainer.global_step
        self._samples = sample_count(batch)
        if self._keep_batches:
            # cloned: a batch may be a view of a large array, and the step may change it
            copied = apply_to_collection(move_data_to_device(batch, "cpu"), Tensor, lambda t: t.detach().clone())
            self._open().batch(copied)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._batch_norms:
            self._batch_norms = list(_batch_norms(pl_module))
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, p) for name, p in pl_module.named_parameters(remove_duplicate=False) if id(p) in mine]
        self._open().gradients(self._gradient_steps, _full({n: p.grad for n, p in named if p.grad is not None}))
        self._gradient_steps += 1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        weight = _number(outputs.get("loss_weight"))
        # where too few samples are left for all ranks, one repeats a sample whose loss then counts nothing
        filler = isinstance(trainer.strategy, ScalableStrategy) and trainer.strategy.batch_share == 0
        record = BatchRecord(
            epoch=trainer.current_epoch,
            step=self._step,
            loss=_number(outputs.get("loss")),
            weight=0.0 if filler and weight is not None else weight,
            samples=0 if filler else self._samples,
        )
        self._open().batch_done(record)
        self._batches_done += 1
        if trainer.global_step >= self._steps:
            # max_steps would end the run too, but would also change the horizon the user's schedule is built for
            trainer.should_stop = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        writer = self._open()
        writer.state("end", capture_state(pl_module))
        writer.finish(self._info(trainer, pl_module))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the state before the first step, when all of the user's own hooks before training have run."""
        self._started = True
        start = capture_state(pl_module)
        trainable = sum(_bytes(p) for p in pl_module.parameters() if p.requires_grad)
        held = sum(_bytes(t) for t in {**start.parameters, **start.buffers}.values())
        self._open().check_space((trainable * self._steps + 2 * held) * (trainer.world_size + 1))
        self._open().state("start", start)

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None

    def _open(self) -> RankWriter:
        if self._writer is None:
            raise ConfigurationError("the recording has not begun: Recorder belongs in the callbacks of Trainer.fit.")
        return self._writer

    def _info(self, trainer: Trainer, pl_module: LightningModule) -> RankInfo:
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        batches = trainer.num_training_batches
        reduced = trainer.strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        return RankInfo(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            replica=int(sampler["rank"]),
            replicas=int(sampler["num_replicas"]),
            strategy=type(trainer.strategy).__name__,
            precision=trainer.precision,
            accumulate=trainer.accumulate_grad_batches,
            automatic_optimization=pl_module.automatic_optimization,
            epoch_batches=None if batches == float("inf") else int(batches),
            reduced_matmul=reduced,
            batch_norms=self._batch_norms,
            steps=trainer.global_step,
        )


def capture_state(module: nn.Module) -> State:
    """Copies every parameter and buffer to the CPU; sharded ones are gathered, so that all ranks must call this."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return State(_full(parameters), _full(buffers), _tied({**parameters, **buffers}))


def _full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full copies on the CPU; a tensor under several names is copied, and later stored, once."""
    from torch.distributed.tensor import DTensor

    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            copies[id(tensor)] = full.detach().to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _tied(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names that are one tensor: one object, or the same elements of one storage."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_identity(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _identity(tensor: Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _batch_norms(module: nn.Module) -> Iterable[str]:
    for name, child in module.named_modules():
        if isinstance(child, _BATCH_NORMS) and (child.training or child.running_mean is None):
            yield name


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
