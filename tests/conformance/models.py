"""Modules as users write them; nothing in them knows about the strategy.

Each keeps its *global* batch: the loader's batch size is that divided by the number of data replicas, as every user of
distributed Lightning does by hand. Sizes are chosen so that a run takes a fraction of a second.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 8
STEPS = 6


def regression_data(samples: int, features: int = 8, seed: int = 0) -> TensorDataset:
    """``(x, y)`` with ``y`` a smooth function of ``x``; a longer set starts with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(features, 1, generator=generator)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, torch.tanh(x @ direction))


def token_data(samples: int, vocabulary: int, length: int) -> TensorDataset:
    tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def replicas(trainer: Trainer) -> int:
    """How many ways the strategy splits the data, which need not be the number of processes."""
    kwargs: dict[str, Any] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return kwargs["num_replicas"] if kwargs else 1


class Base(LightningModule):
    """Trains ``samples`` regression samples in global batches of ``batch`` with SGD, and notes every loss.

    Args:
        samples: Training samples.
        batch: Global batch size.
        lr: Learning rate.
        momentum: Of SGD.
    """

    def __init__(
        self, samples: int = BATCH * STEPS, batch: int = BATCH, lr: float = 0.05, momentum: float = 0.9
    ) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.samples, self.batch, self.lr, self.momentum = samples, batch, lr, momentum
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        """Make the layers."""
        raise NotImplementedError

    def loss(self, batch: Any, index: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def dataset(self) -> Dataset[Any]:
        return regression_data(self.samples)

    @property
    def local_batch(self) -> int:
        return self.batch // replicas(self.trainer)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=self.local_batch)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)


class Mlp(Base):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


class Block(nn.Module):
    """Pre-norm transformer block. No bias on q, k, v: the gradient of a key bias is exactly zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Gpt(Base):
    vocabulary, length, width, depth = 19, 6, 16, 4

    def build(self) -> None:
        self.token = nn.Embedding(self.vocabulary, self.width)
        self.position = nn.Parameter(torch.randn(self.length, self.width) * 0.02)
        self.blocks = nn.ModuleList([Block(self.width) for _ in range(self.depth)])
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, self.vocabulary, bias=False)

    def dataset(self) -> Dataset[Any]:
        return token_data(self.samples, self.vocabulary, self.length)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class TiedGpt(Gpt):
    def build(self) -> None:
        super().build()
        self.head.weight = self.token.weight


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LoraGpt(Gpt):
    """Everything frozen but low-rank adapters."""

    def build(self) -> None:
        super().build()
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.out = LoraLinear(block.qkv), LoraLinear(block.out)


class ConvBatchNorm(Base):
    """BatchNorm in evaluation statistics: batch statistics of a part of a batch cannot equal those of the whole."""

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1].eval()

    def loss(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self.net(batch[0][:, None]), batch[1])


class OwnStep(Base):
    """Its own training_step on a dict batch, two losses, a returned dict, parameter groups and a schedule per step."""

    def build(self) -> None:
        self.encoder = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"y": nn.Linear(16, 1), "sum": nn.Linear(16, 1)})

    def train_dataloader(self) -> Any:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
            x, y = (torch.stack(column) for column in zip(*samples, strict=True))
            return {"x": x, "y": y, "key": ["k"] * len(samples)}

        return DataLoader(self.dataset(), batch_size=self.local_batch, collate_fn=collate)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        hidden = torch.tanh(self.encoder(batch["x"]))
        main = F.mse_loss(self.heads["y"](hidden), batch["y"])
        auxiliary = F.l1_loss(self.heads["sum"](hidden), batch["x"].sum(1, keepdim=True))
        loss = main + 0.3 * auxiliary
        self.losses.append(loss.item())
        return {"loss": loss, "parts": (main.detach(), auxiliary.detach())}

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.encoder.parameters(), "weight_decay": 0.1},
            {"params": self.heads.parameters(), "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
