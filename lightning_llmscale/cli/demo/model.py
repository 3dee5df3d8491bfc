"""The demo's model: a small GPT over bytes, an ordinary LightningModule that knows nothing of strategies."""

from __future__ import annotations

__all__ = ["ByteGPT", "sequences", "tokens"]

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override


class Block(nn.Module):
    """A transformer block: causal attention, then a two-layer MLP, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Maps activations of shape (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(LightningModule):
    """A decoder-only transformer that predicts the next byte.

    Args:
        width: Size of the residual stream.
        depth: Number of blocks.
        heads: Attention heads; must divide `width`.
        seq_len: Longest context, in tokens.
        vocab_size: 256 bytes and the token that ends a document.
        learning_rate: AdamW's peak learning rate, reached after `warmup_steps` and then constant.
        warmup_steps: Optimizer steps over which the learning rate grows linearly from zero.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        seq_len: int = 128,
        vocab_size: int = 257,
        learning_rate: float = 2e-3,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seq_len = seq_len
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the logits, (batch, time, vocab_size), of the token after each of `input_ids`, (batch, time)."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross entropy, in nats per token, of a batch with ``input_ids`` and ``labels``."""
        logits = self(batch["input_ids"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # with the usual eps of 1e-8 Adam turns the rounding of near-zero gradients into whole steps, and runs on
        # different numbers of processes part ways earlier
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.inference_mode()
    def generate(self, prompt: str, length: int, *, temperature: float = 0.7, seed: int = 0) -> str:
        """Continues a text.

        Args:
            prompt: The beginning; UTF-8.
            length: Bytes to add; generation stops early at the end of a document.
            temperature: Below 1 the likely bytes become more likely.
            seed: Makes the sample reproducible.

        Returns:
            The prompt and its continuation.
        """
        source = torch.Generator().manual_seed(seed)
        tokens = list(prompt.encode())
        for _ in range(length):
            context = torch.tensor([tokens[-self.seq_len :]], device=self.device)
            weights = (self(context)[0, -1] / temperature).softmax(dim=0).cpu()
            token = int(torch.multinomial(weights, 1, generator=source))
            if token > 255:
                break
            tokens.append(token)
        return bytes(tokens).decode("utf-8", errors="replace")


def sequences(batch: dict[str, Tensor]) -> int:
    """Returns the number of sequences in a batch, for Lightning's ThroughputMonitor."""
    return batch["input_ids"].shape[0]


def tokens(batch: dict[str, Tensor]) -> int:
    """Returns the number of tokens in a batch, for Lightning's ThroughputMonitor."""
    return batch["input_ids"].numel()
