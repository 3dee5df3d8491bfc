"""Modules, strategies with planted faults, and the build function that the tests of verify give to its processes."""

# no `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        self.register_buffer("projection", torch.randn(8, 8, generator=generator))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        hidden = self.embedding(tokens) @ self.projection
        return nn.functional.cross_entropy(self.head(self.body(hidden)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*tokens()), batch_size=4)


def tokens(samples: int = 96) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]


class SummedGradients(DDPStrategy):
    """Adds the gradients of the ranks and forgets to divide."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, sum_of_ranks)


def sum_of_ranks(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class SkippingRank(DDPStrategy):
    """Rank 1 takes part in the exchange and goes on with its own gradients."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(self.global_rank, mean_except_on_rank_1)


def mean_except_on_rank_1(rank: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    own = bucket.buffer().clone()
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda done: own if rank == 1 else done.value()[0] / dist.get_world_size())


class NoExchange(DDPStrategy):
    """Every rank trains alone."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(None, own_gradients)


def own_gradients(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class UnsharedBuffers(DDPStrategy):
    """Leaves every rank its own buffers."""

    def __init__(self) -> None:
        super().__init__(broadcast_buffers=False)


class UntiedWeights(DDPStrategy):
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


def record_job(folder: Path, strategy: type, model: type, options: Mapping[str, Any], settings: Settings) -> None:
    """On every rank: train under the strategy and record."""
    trainer = new_trainer(strategy_options(folder), strategy=strategy(), devices=2, **options)
    record(Run(trainer, model()), folder / "strategy", settings)


def replay_job(folder: Path, model: type, options: Mapping[str, Any], settings: Settings) -> None:
    """In one process: train plainly on what was recorded."""
    run = Run(new_trainer(plain_options(folder), **options), model())
    replay(run, folder / "strategy", folder / "plain", settings)


def new_trainer(verify_options: Mapping[str, Any], **options: Any) -> Trainer:
    return Trainer(**{"accelerator": "cpu", "max_epochs": 3, **options, **verify_options})
