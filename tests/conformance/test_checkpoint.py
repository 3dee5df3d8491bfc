"""A checkpoint is an ordinary Lightning checkpoint: any strategy and any number of processes continue from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.conformance.harness import Conformance, assert_ranks_agree, assert_same_weights
from tests.conformance.jobs import PLAIN, Fit, StrategySpec, fit, new_trainer, rank, summary
from tests.conformance.models import Mlp, regression_data, replicas
from tests.support.pool import RankPool


class Scheduled(Mlp):
    """Adam and a schedule: weights depend on all the state a checkpoint must carry."""

    def __init__(self, lr: float = 0.02, samples: int = 32, width: int = 16) -> None:
        super().__init__(lr=lr, samples=samples)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr, eps=1e-4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def first_half(strategy: StrategySpec, path: str) -> None:
    trainer = new_trainer(strategy, max_epochs=2)
    trainer.fit(Scheduled())
    trainer.save_checkpoint(path)


def second_half(strategy: StrategySpec, path: str) -> Fit:
    module = Scheduled()
    trainer = new_trainer(strategy, max_epochs=4)
    trainer.fit(module, ckpt_path=path)
    return summary(trainer, module)


@pytest.mark.feature("resume")
@pytest.mark.parametrize(("before", "after"), [("ranks", "ranks"), ("one process", "ranks"), ("ranks", "one process")])
def test_resume_on_another_world_size(
    conformance: Conformance, pool1: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    path = str(tmp_path / "half.ckpt")
    want = conformance.plain(fit, Scheduled, None, {"max_epochs": 4})
    for job, where in ((first_half, before), (second_half, after)):
        results = conformance.ranks(job, path) if where == "ranks" else pool1.run(job, PLAIN, path)
    assert {result.steps for result in results} == {want.steps}
    assert_same_weights(results[0].weights, want.weights)
    assert_ranks_agree(results)


def load_plainly(strategy: StrategySpec, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = Scheduled.load_from_checkpoint(path, map_location="cpu", weights_only=False)
    return dict(module.hparams), module.state_dict()


def fit_and_save(strategy: StrategySpec, path: str) -> None:
    trainer = new_trainer(strategy)
    trainer.fit(Scheduled(lr=0.01, samples=48))
    trainer.save_checkpoint(path)


@pytest.mark.feature("checkpoint")
def test_load_from_checkpoint_in_a_plain_process(conformance: Conformance, pool1: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "trained.ckpt")
    conformance.ranks(fit_and_save, path)
    hparams, weights = pool1.run(load_plainly, PLAIN, path)[0]
    assert hparams == {"lr": 0.01, "samples": 48, "width": 16}
    want = conformance.plain(fit, Scheduled, {"lr": 0.01, "samples": 48})
    assert_same_weights(weights, want.weights)


class OwnState(Mlp):
    """Stores keys of its own, and of its weights all but the first layer."""

    tag: str | None = None

    def build(self) -> None:
        super().build()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tag"] = "hello"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes = checkpoint["tag"]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if not k.startswith("net.0")}


class CountingCallback(Callback):
    count = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def save_own_state(strategy: StrategySpec, path: str) -> list[str]:
    trainer = new_trainer(strategy, callbacks=[CountingCallback()])
    trainer.fit(OwnState())
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return sorted(torch.load(path, weights_only=False)["state_dict"])


def load_own_state(strategy: StrategySpec, path: str) -> tuple[str, int]:
    module, counting = OwnState(), CountingCallback()
    trainer = new_trainer(strategy, callbacks=[counting], max_epochs=2)
    trainer.fit(module, ckpt_path=path)
    return module.notes, counting.count


@pytest.mark.feature("checkpoint")
def test_own_state_of_modules_and_callbacks(conformance: Conformance, tmp_path: Path) -> None:
    path = str(tmp_path / "own.ckpt")
    names = conformance.ranks(save_own_state, path)
    assert not [name for name in names[0] if name.startswith("net.0")]
    assert conformance.ranks(load_own_state, path) == [("hello", 12)] * conformance.world_size


class StatefulLoader:
    """A user's own loader that knows its length and its position, and splits the data itself."""

    def __init__(self, replicas: int, replica: int) -> None:
        self.replicas, self.replica, self.position = replicas, replica, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        x, y = regression_data(64).tensors
        while self.position < len(self):
            indices = list(range(self.position * 8 + self.replica, (self.position + 1) * 8, self.replicas))
            self.position += 1
            yield torch.tensor(indices), x[indices], y[indices]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Streams(Mlp):
    def build(self) -> None:
        super().build()
        self.notes: list[int] = []

    def train_dataloader(self) -> Any:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return StatefulLoader(replicas(self.trainer), kwargs["rank"])

    def loss(self, batch: Any, index: int) -> Tensor:
        self.notes += batch[0].tolist()
        return super().loss(batch[1:], index)


def first_steps(strategy: StrategySpec, path: str) -> list[int]:
    module = Streams()
    trainer = new_trainer(strategy, max_steps=3, max_epochs=-1, callbacks=[SaveAtStep3(path)])
    trainer.fit(module)
    return module.notes


class SaveAtStep3(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def remaining_steps(strategy: StrategySpec, path: str) -> Fit:
    module = Streams()
    trainer = new_trainer(strategy, max_epochs=1)
    trainer.fit(module, ckpt_path=path)
    return summary(trainer, module)


@pytest.mark.feature("stateful_loader")
def test_resume_in_the_middle_of_an_epoch_repeats_and_skips_nothing(conformance: Conformance, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    before = conformance.ranks(first_steps, path)
    after = conformance.ranks(remaining_steps, path)
    seen = [index for part in before for index in part] + [index for result in after for index in result.notes]
    assert sorted(seen) == list(range(64))
    want = conformance.plain(fit, Streams)
    assert {result.steps for result in after} == {want.steps}
    assert_same_weights(after[0].weights, want.weights)


def save_weights_only(strategy: StrategySpec, path: str) -> None:
    trainer = new_trainer(strategy)
    trainer.fit(Mlp())
    trainer.save_checkpoint(path, weights_only=True)


@pytest.mark.feature("checkpoint")
def test_checkpoint_of_weights_only(conformance: Conformance, tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    conformance.ranks(save_weights_only, str(path))
    content = torch.load(path, weights_only=False)
    assert "optimizer_states" not in content
    assert_same_weights(content["state_dict"], conformance.plain(fit, Mlp).weights)


def save_on_rank_0_only(strategy: StrategySpec) -> None:
    trainer = new_trainer(strategy)
    trainer.fit(Mlp())
    if rank() == 0:
        trainer.save_checkpoint("alone.ckpt")


@pytest.mark.feature("checkpoint")
def test_saving_on_rank_0_only_ends_with_a_message(conformance: Conformance) -> None:
    outcome = conformance.pool.outcomes(save_on_rank_0_only, conformance.strategy, timeout=45.0)[0]
    assert not outcome.timed_out, str(outcome)
    if outcome.error is not None:
        words = outcome.error.message
        assert any(w in words for w in ("every rank", "all ranks", "each rank")), words


def stop_in_the_middle(strategy: StrategySpec, path: str, samples: int) -> None:
    trainer = new_trainer(strategy, max_steps=3, max_epochs=-1, callbacks=[SaveAtStep3(path)])
    trainer.fit(Scheduled(samples=samples))


def continue_from_the_middle(strategy: StrategySpec, path: str, samples: int) -> Fit:
    module = Scheduled(samples=samples)
    trainer = new_trainer(strategy, max_epochs=2)
    trainer.fit(module, ckpt_path=path)
    return summary(trainer, module)


@pytest.mark.feature("resume")
@pytest.mark.parametrize("samples", [48, 45])
def test_resume_in_the_middle_of_an_epoch_as_one_process_does(
    conformance: Conformance, pool1: RankPool, tmp_path: Path, samples: int
) -> None:
    """An ordinary loader has no position; what Lightning makes of that in one process is what ranks must make of it."""
    path, alone = str(tmp_path / "ranks.ckpt"), str(tmp_path / "alone.ckpt")
    conformance.ranks(stop_in_the_middle, path, samples)
    got = conformance.ranks(continue_from_the_middle, path, samples)
    pool1.run(stop_in_the_middle, PLAIN, alone, samples)
    want = pool1.run(continue_from_the_middle, PLAIN, alone, samples)[0]
    assert {result.steps for result in got} == {want.steps}
    assert_same_weights(got[0].weights, want.weights)
