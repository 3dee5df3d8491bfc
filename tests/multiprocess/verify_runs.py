"""Modules, strategies with planted faults, and the build function that the tests of verify give to its processes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_llmscale import RingAllReduceStrategy
from lightning_llmscale.collectives.reducer import Reducer
from lightning_llmscale.verification import Settings, plain_options, record, replay, strategy_options

VOCABULARY, LENGTH = 11, 6


class TiedLM(LightningModule):
    """A language model with tied embeddings and a random buffer that every rank draws for itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
        generator = torch.Generator().manual_seed(int(rank))
        self.register_buffer("projection", torch.randn(8, 8, generator=generator))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        hidden = self.embedding(tokens) @ self.projection
        return nn.functional.cross_entropy(self.head(self.body(hidden)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*tokens()), batch_size=4)


class OddData(TiedLM):
    """A last batch of one sample, of which rank 1 gets none; drawn in another order each epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*tokens(29)), batch_size=4, shuffle=True)


class TokenMean(OddData):
    """A mean over some of the tokens, of which ranks have different numbers."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Any]:
        tokens, targets = batch
        counted = ((tokens * 7 + targets) % 5 < 2).float().flatten()
        logits = self.head(self.body(self.embedding(tokens) @ self.projection)).flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return {"loss": (losses * counted).sum() / counted.sum().clamp(min=1), "loss_weight": counted.sum()}


class WithDropout(TiedLM):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)


class DictBatches(TiedLM):
    """Batches that hold a string for each sample."""

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = tokens()
        return DataLoader(
            [{"x": a, "y": b, "key": f"{i}"} for i, (a, b) in enumerate(zip(x, y, strict=True))], batch_size=4
        )

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        if len(batch["key"]) != len(batch["x"]):
            raise ValueError(f"{len(batch['key'])} keys of {len(batch['x'])} samples")
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def tokens(samples: int = 96) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]


def from_catalogue(class_path: str) -> Strategy:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)()


class FaultyReducer:
    """Stands between the communication thread and the reducer."""

    def __init__(self, inner: Reducer) -> None:
        self.inner = inner

    def close(self, reason: str | None = None) -> None:
        self.inner.close(reason)


class Summing(FaultyReducer):
    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        self.inner.all_reduce(flat, 1.0, stream)


class KeepingOwn(FaultyReducer):
    def all_reduce(self, flat: Tensor, scale: float, stream: Hashable | None = None) -> None:
        own = flat.clone()
        self.inner.all_reduce(flat, scale, stream)
        flat.copy_(own)


class SummedGradients(RingAllReduceStrategy):
    """Adds the gradients of the ranks and forgets to divide."""

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        plant(self, Summing)


class SkippingRank(RingAllReduceStrategy):
    """Rank 1 takes part in the exchange and goes on with its own gradients."""

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self.global_rank == 1:
            plant(self, KeepingOwn)


class NoExchange(RingAllReduceStrategy):
    """Every rank goes on with its own gradients."""

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        plant(self, KeepingOwn)


def plant(strategy: RingAllReduceStrategy, fault: type[FaultyReducer]) -> None:
    thread = strategy._reduction.thread
    thread._reducer = fault(thread._reducer)


class UnsharedBuffers(RingAllReduceStrategy):
    """Leaves every rank its own buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_kwargs["broadcast_buffers"] = False


class UntiedWeights(RingAllReduceStrategy):
    """Copies the shared weight of the head, as wrapping or sharding module by module does."""

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        module.head.weight = nn.Parameter(module.embedding.weight.detach().clone())
        super().setup(trainer)


@dataclass
class Run:
    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule | None = None


def record_job(
    folder: Path,
    strategy: Callable[[], Strategy],
    model: type[LightningModule],
    options: Mapping[str, Any],
    settings: Settings,
) -> None:
    """On every rank: train under the strategy and record."""
    world = int(os.environ["WORLD_SIZE"])
    trainer = new_trainer(strategy_options(folder), strategy=strategy(), devices=world, **options)
    record(Run(trainer, model()), folder / "strategy", settings)


def replay_job(folder: Path, model: type[LightningModule], options: Mapping[str, Any], settings: Settings) -> None:
    """In one process: train plainly on what was recorded."""
    run = Run(new_trainer(plain_options(folder), **options), model())
    replay(run, folder / "strategy", folder / "plain", settings)


def new_trainer(verify_options: Mapping[str, Any], **options: Any) -> Trainer:
    return Trainer(**{"accelerator": "cpu", "max_epochs": 3, **options, **verify_options})


def build_failing_on_rank_1(arguments: Sequence[str], trainer_options: Mapping[str, Any]) -> Run:
    """A build function whose module fails in its second step on one rank."""
    trainer = new_trainer({"devices": 2, "strategy": RingAllReduceStrategy(), **trainer_options})
    return Run(trainer, FailingOnRank1())


class FailingOnRank1(TiedLM):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("the second batch of rank 1")
        return super().training_step(batch, batch_idx)
