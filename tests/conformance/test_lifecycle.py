"""One trainer used for everything, several trainers in a process, and what a terminal and a folder look like after."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_llmscale.strategies.catalog import STRATEGIES
from tests.conformance import models
from tests.conformance.harness import Conformance, assert_same_weights
from tests.conformance.jobs import Fit, StrategySpec, fit, new_trainer, summary
from tests.conformance.models import Base, Mlp, regression_data
from tests.support.pool import RankPool


class Evaluated(Mlp):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, batch_idx), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(9, seed=5), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def whole_life(strategy: StrategySpec) -> tuple[list[float], list[float], Fit]:
    module = Evaluated()
    trainer = new_trainer(strategy, max_epochs=1, num_sanity_val_steps=2)
    values = [trainer.validate(module, verbose=False)[0]["val"]]
    trainer.fit(module)
    values.append(trainer.validate(module, verbose=False)[0]["val"])
    values.append(trainer.test(module, verbose=False)[0]["val"])
    predictions = [value for batch in trainer.predict(module) or [] for value in batch.flatten().tolist()]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    values.append(trainer.test(module, verbose=False)[0]["val"])
    return values, predictions, summary(trainer, module)


@pytest.mark.feature("lifecycle")
def test_validate_fit_validate_test_predict_and_fit_again(conformance: Conformance) -> None:
    values, predictions, want = conformance.plain(whole_life)
    results = conformance.ranks(whole_life)
    for got_values, _, result in results:
        assert got_values == pytest.approx(values, rel=1e-5)
        assert result.steps == want.steps
    together = sorted(value for _, part, _ in results for value in part)
    assert together == pytest.approx(sorted(predictions), rel=1e-5, abs=1e-6)
    assert_same_weights(results[0][2].weights, want.weights)


def several_trainers(strategy: StrategySpec) -> list[Fit]:
    results = []
    for kind in (Mlp, models.Gpt, Mlp):
        module: Base = kind()
        trainer = new_trainer(strategy)
        trainer.fit(module)
        results.append(summary(trainer, module))
    return results


@pytest.mark.feature("lifecycle")
def test_several_trainers_in_one_process(conformance: Conformance) -> None:
    want = conformance.plain(several_trainers)
    for result, truth in zip(conformance.ranks(several_trainers)[0], want, strict=True):
        assert_same_weights(result.weights, truth.weights)


@pytest.mark.feature("lifecycle")
def test_module_is_the_users_own_again_after_fit(conformance: Conformance) -> None:
    assert conformance.ranks(train_then_use) == [(True, True)] * conformance.world_size


def train_then_use(strategy: StrategySpec) -> tuple[bool, bool]:
    module = Mlp()
    trainer = new_trainer(strategy)
    trainer.fit(module)
    x, y = regression_data(8).tensors
    torch.nn.functional.mse_loss(module(x), y).backward()
    return trainer.model is module, all(p.grad is not None for p in module.parameters())


@pytest.mark.feature("devices_1")
@pytest.mark.parametrize("kind", [models.Mlp, models.OwnStep])
def test_one_device(conformance: Conformance, pool1: RankPool, kind: type[Base]) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    got = pool1.run(fit, conformance.strategy, kind, {"samples": 29}, options)[0]
    want = conformance.plain(fit, kind, {"samples": 29}, options)
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert_same_weights(got.weights, want.weights)


def fit_by_name(strategy: StrategySpec, name: str) -> tuple[str, int]:
    import lightning_llmscale  # noqa: F401  (registers the names)

    trainer = new_trainer(strategy)
    by_name = type(trainer)(
        strategy=name,
        accelerator="cpu",
        devices=trainer.num_devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    by_name.fit(Mlp())
    return type(by_name.strategy).__qualname__, by_name.global_step


@pytest.mark.feature("training")
def test_strategy_by_its_name(conformance: Conformance, strategy_name: str) -> None:
    expected = STRATEGIES[strategy_name].class_path.rpartition(".")[2]
    assert conformance.ranks(fit_by_name, strategy_name) == [(expected, 6)] * conformance.world_size


#: What stock Lightning and torch write on every rank.
LIGHTNINGS_OWN = "GLOBAL_RANK|Warning|deprecated|`weights_only` was not set|find_unused_parameters=True"


@pytest.mark.feature("logging")
def test_only_rank_0_speaks(conformance: Conformance) -> None:
    options = {"enable_progress_bar": True, "enable_model_summary": True, "max_epochs": 2}
    first, *others = conformance.pool.outcomes(fit, conformance.strategy, Evaluated, None, options)
    assert first.ok, str(first)
    assert len(re.findall("Trainable params", first.log)) == 1
    assert "Epoch 1" in first.log
    for outcome in others:
        assert outcome.ok, str(outcome)
        noise = [line for line in outcome.log.splitlines() if line.strip() and not re.search(LIGHTNINGS_OWN, line)]
        assert not noise, f"rank {outcome.rank} wrote {noise}"


@pytest.mark.feature("logging")
def test_simple_profiler(conformance: Conformance) -> None:
    conformance.same_training(Mlp, None, {"profiler": "simple"})


@pytest.mark.feature("limits")
@pytest.mark.parametrize("options", [{"barebones": True}, {"deterministic": True}, {"inference_mode": False}])
def test_trainer_modes(conformance: Conformance, options: dict[str, Any]) -> None:
    conformance.same_training(Mlp, None, options if "barebones" not in options else {**BAREBONES, **options})


#: Options that barebones mode refuses to be given at all.
BAREBONES = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None,
             "num_sanity_val_steps": None}  # fmt: skip


class Prepared(LightningDataModule):
    """Downloads once per machine and reads everywhere, as Lightning's documentation has it."""

    def prepare_data(self) -> None:
        path = Path("data.pt")
        if path.exists():
            raise FileExistsError("prepare_data ran twice")
        torch.save(regression_data(48).tensors, path)

    def setup(self, stage: str) -> None:
        self.tensors = torch.load("data.pt")

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        dataset = torch.utils.data.TensorDataset(*self.tensors)
        return DataLoader(dataset, batch_size=8 // models.replicas(self.trainer))


def fit_datamodule(strategy: StrategySpec) -> Fit:
    module = Mlp()
    trainer = new_trainer(strategy)
    trainer.fit(module, datamodule=Prepared())
    return summary(trainer, module)


@pytest.mark.feature("lifecycle")
def test_datamodule_is_prepared_once(conformance: Conformance) -> None:
    got = conformance.ranks(fit_datamodule)
    assert_same_weights(got[0].weights, conformance.plain(fit, Mlp).weights)


def seeded_script(strategy: StrategySpec) -> Fit:
    """An ordinary script: a seed at the top, random numbers for weights or splits, and a loader that shuffles."""
    module = Mlp()
    seed_everything(17, workers=True, verbose=False)
    torch.rand(5)
    trainer = new_trainer(strategy, max_epochs=2)
    trainer.fit(module, DataLoader(regression_data(48), batch_size=8 // trainer.world_size, shuffle=True))
    return summary(trainer, module)


@pytest.mark.feature("seeding")
def test_seeded_script_gives_the_result_of_one_process(conformance: Conformance) -> None:
    got, want = conformance.ranks(seeded_script), conformance.plain(seeded_script)
    assert_same_weights(got[0].weights, want.weights)
