"""An ordinary Lightning script with one changed argument: `strategy`. Run it with `python examples/train.py`."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_llmscale import RingAllReduceStrategy


class Regression(LightningModule):
    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
        self.learning_rate = learning_rate

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self):
        x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=32)


if __name__ == "__main__":
    trainer = Trainer(strategy=RingAllReduceStrategy(), accelerator="cpu", devices=2, max_epochs=2)
    trainer.fit(Regression())
