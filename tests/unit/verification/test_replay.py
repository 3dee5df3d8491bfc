"""Recording a run and replaying it in the same process: whatever a module does, it must equal itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification import Report, Settings, compare, plain_options, record, replay, strategy_options
from lightning_llmscale.verification.recording import BatchRecord, RankReader
from lightning_llmscale.verification.replay import loss_factors
from tests.multiprocess.verify_runs import Run


class Module(LightningModule):
    """Starts from other weights every time it is built; notes what it sees."""

    def __init__(self, samples: int = 20) -> None:
        super().__init__()
        self.samples = samples
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.epochs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.epochs.append(self.current_epoch)
        x, y = batch
        self.seen += len(x)
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total), "interval": "step"}
        ]

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.samples), batch_size=4, shuffle=True)


def dataset(samples: int) -> TensorDataset:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def verified(
    folder: Path,
    recorded: LightningModule,
    replayed: LightningModule,
    settings: Settings | None = None,
    data: tuple[LightningDataModule, LightningDataModule] | tuple[None, None] = (None, None),
    **options: Any,
) -> Report:
    settings = settings or Settings(steps=6)
    common = {"accelerator": "cpu", "max_epochs": 4, **options}
    record(Run(Trainer(**{**common, **strategy_options(folder)}), recorded, data[0]), folder / "strategy", settings)
    replay(
        Run(Trainer(**{**common, **plain_options(folder)}), replayed, data[1]),
        folder / "strategy",
        folder / "plain",
        settings,
    )
    return compare(folder / "strategy", folder / "plain", settings)


def identical(report: Report) -> bool:
    return report.passed and all(largest.difference == 0 for largest in report.largest.values())


@pytest.mark.parametrize("optimizer", ["sgd", "user"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_equals_its_replay_bit_by_bit(tmp_path: Path, optimizer: Any, accumulate: int) -> None:
    recorded, replayed = Module(), Module()
    settings = Settings(steps=7, optimizer=optimizer)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    report = verified(tmp_path, recorded, replayed, settings, **options)
    assert identical(report)
    assert report.steps == 7
    assert replayed.epochs == recorded.epochs
    assert len(set(recorded.epochs)) > 1
    assert "seen" in report.largest["buffers"].name


def test_a_run_that_ends_before_the_steps_is_compared_to_its_end(tmp_path: Path) -> None:
    report = verified(tmp_path, Module(), Module(), Settings(steps=1000), max_epochs=2)
    assert identical(report)
    assert report.steps == 10


class Initialising(Module):
    """Draws its weights in a hook, when both runs have been set up."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def test_weights_drawn_in_a_hook_are_the_start(tmp_path: Path) -> None:
    assert identical(verified(tmp_path, Initialising(), Initialising()))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        while True:
            x = torch.randn(3, generator=generator)
            yield x, x.sum(0, keepdim=True)


class Streaming(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), batch_size=2)


def test_loaders_without_length(tmp_path: Path) -> None:
    assert identical(verified(tmp_path, Streaming(), Streaming(), max_epochs=-1))


class Augmented(NamedTuple):
    x: Tensor
    y: Tensor


class Data(LightningDataModule):
    """Adds noise when a batch is moved to the device, so that a second pass would change it."""

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(24), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return Augmented(x + torch.randn_like(x), y)


def test_data_modules_and_random_transfer_hooks(tmp_path: Path) -> None:
    assert identical(verified(tmp_path, Module(), Module(), data=(Data(), Data())))


class ByHand(Module):
    """Two optimizers of which one steps every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[0].parameters()), torch.optim.AdamW(self.net[3].parameters())]


@pytest.mark.parametrize("optimizer", ["sgd", "user"])
def test_optimizers_stepped_by_hand(tmp_path: Path, optimizer: Any) -> None:
    assert identical(verified(tmp_path, ByHand(), ByHand(), Settings(steps=6, optimizer=optimizer)))


class Twice(Module):
    """Not the module that was recorded: its loss is doubled."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 2 * super().training_step(batch, batch_idx)


def test_another_loss_is_noticed(tmp_path: Path) -> None:
    report = verified(tmp_path, Twice(), Module())
    assert report.first is not None
    assert (report.first.quantity, report.first.step) == ("loss", 0)
    assert report.hints == ["Every gradient is 2 times that of the plain run."]


class Wider(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net[0], self.net[3] = nn.Linear(3, 5), nn.Linear(5, 1)


def test_a_module_of_other_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"net.0.weight has the shape \(4, 3\) under the strategy and \(5, 3\)"
    ):
        verified(tmp_path, Module(), Wider())


def test_a_run_without_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="trained on no batch"):
        verified(tmp_path, Module(), Module(), limit_train_batches=0)


class Iterating(Module):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_step_that_draws_its_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dataloader_iter"):
        verified(tmp_path, Iterating(), Iterating())


def test_several_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="num_nodes=1"):
        verified(tmp_path, Module(), Module(), num_nodes=2, strategy="ddp")


class Joining(Module):
    def llmscale_join_batches(self, batches: list[Any]) -> Any:
        return batches[0]


def test_a_module_may_join_batches_itself(tmp_path: Path) -> None:
    recorded, replayed = Joining(), Joining()
    assert identical(verified(tmp_path, recorded, replayed))


class Spoiling(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].zero_()


def test_recorded_batches_are_copies(tmp_path: Path) -> None:
    assert identical(verified(tmp_path, Spoiling(), Spoiling()))
    x, _ = RankReader(tmp_path / "strategy" / "rank0").batch(0)
    assert x.abs().sum() > 0
    assert x.untyped_storage().nbytes() == x.numel() * 4


def of(step: int, weight: float | None, samples: int = 4) -> BatchRecord:
    return BatchRecord(epoch=0, step=step, loss=1.0, weight=weight, samples=samples)


def test_plain_means_are_left_to_lightning() -> None:
    assert loss_factors([[of(0, None)], [of(0, None, 1)], [of(1, None)]], accumulate=2) == [1.0, 1.0, 1.0]


def test_declared_weights_are_averaged_over_ranks_and_window() -> None:
    records = [[of(0, 1.0), of(0, 2.0)], [of(0, 4.0), of(0, 5.0)], [of(1, 3.0), of(1, 0.0)], [of(2, 0.0), of(2, 0.0)]]
    assert loss_factors(records, accumulate=2) == [2 * 3 / 12, 2 * 9 / 12, 2.0, 0.0]
