"""What verify switches off or replaces in a user's run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification import Settings
from lightning_llmscale.verification.isolation import isolate
from tests.multiprocess.verify_runs import Run


class Configured(LightningModule):
    """Returns its optimizers in one of Lightning's forms."""

    def __init__(self, form: str, by_hand: bool = False) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2)
        self.form = form
        self.automatic_optimization = not by_hand

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.trained.weight], "weight_decay": 0.1}, {"params": [self.trained.bias], "lr": 7.0}]
        optimizer = AdamW(groups, lr=1e-3)
        schedule = LambdaLR(optimizer, lambda step: 0.5)
        return {
            "none": None,
            "one": optimizer,
            "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}},
            "lists": ([optimizer], [schedule]),
            "two": [optimizer, AdamW(self.frozen.parameters())],
            "two dicts": [{"optimizer": optimizer}, {"optimizer": AdamW(self.frozen.parameters())}],
        }[self.form]

    def configure_callbacks(self) -> Any:
        raise AssertionError("verify attaches no callbacks")


def isolated(module: LightningModule, settings: Settings | None = None) -> LightningModule:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    isolate(Run(trainer, module), settings or Settings(lr=0.5), [])
    assert trainer.callbacks == []
    return module


@pytest.mark.parametrize("form", ["one", "dict", "lists"])
def test_sgd_trains_the_parameters_of_the_users_optimizer(form: str) -> None:
    module = isolated(Configured(form))
    optimizer = module.configure_optimizers()
    assert type(optimizer) is SGD
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(module.trained.weight)],
        [id(module.trained.bias)],
    ]
    assert all(group["lr"] == 0.5 and group["weight_decay"] == 0 for group in optimizer.param_groups)


@pytest.mark.parametrize("form", ["two", "two dicts"])
def test_every_optimizer_is_replaced_by_its_own_sgd(form: str) -> None:
    first, second = isolated(Configured(form, by_hand=True)).configure_optimizers()
    assert type(first) is type(second) is SGD
    assert len(second.param_groups[0]["params"]) == 2


def test_a_module_without_optimizer_stays_without() -> None:
    assert isolated(Configured("none")).configure_optimizers() is None


def test_the_users_optimizer_is_kept_on_request() -> None:
    assert type(isolated(Configured("one"), Settings(optimizer="user")).configure_optimizers()) is AdamW


def test_a_schedule_stepped_by_hand_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--optimizer user"):
        isolated(Configured("dict", by_hand=True)).configure_optimizers()


def test_no_callbacks_of_the_module() -> None:
    assert isolated(Configured("one")).configure_callbacks() == []


def test_an_isolated_module_can_be_sent_to_spawned_processes() -> None:
    module = pickle.loads(pickle.dumps(isolated(Configured("one"))))
    optimizer = module.configure_optimizers()
    assert optimizer.param_groups[0]["params"][0] is module.trained.weight
