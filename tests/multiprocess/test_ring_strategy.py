"""RingAllReduceStrategy's own options: every algorithm gives the result of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_llmscale
from lightning_llmscale.collectives.ddp_hook import StockReduction, reduce_bucket_stock
from lightning_llmscale.errors import ConfigurationError, RefusedFeatureError
from tests.conformance.harness import Conformance
from tests.conformance.jobs import PLAIN, StrategySpec, fit
from tests.conformance.models import Gpt
from tests.support.pool import RankPool

PATH = "lightning_llmscale.RingAllReduceStrategy"
truths: dict[bytes, Any] = {}


def conformance(pool: RankPool, oracle: RankPool, **options: Any) -> Conformance:
    return Conformance(StrategySpec(PATH, options), pool, oracle, truths, refusal=None)


@pytest.mark.parametrize("algorithm", ["stock", "ring", "shared_memory"])
def test_algorithm_on_two_ranks(pool1: RankPool, pool2: RankPool, algorithm: str) -> None:
    conformance(pool2, pool1, algorithm=algorithm).same_training(Gpt)


@pytest.mark.parametrize("algorithm", ["ring", "shared_memory"])
def test_algorithm_on_four_ranks_in_small_buckets(pool1: RankPool, pool4: RankPool, algorithm: str) -> None:
    conformance(pool4, pool1, algorithm=algorithm, bucket_cap_mb=0.001).same_training(Gpt)


def test_static_graph(pool1: RankPool, pool2: RankPool) -> None:
    conformance(pool2, pool1, static_graph=True).same_training(Gpt)


class StockHook(DDPStrategy):
    """The hook that serves GPUs, here over gloo."""

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(StockReduction(self.model.process_group, 0.5), reduce_bucket_stock)


def train_with_stock_hook(spec: StrategySpec) -> dict[str, Tensor]:
    return fit(StrategySpec(f"{__name__}.StockHook"), Gpt).weights


def test_hook_that_leaves_the_sum_to_the_process_group(pool1: RankPool, pool2: RankPool) -> None:
    want = pool1.run(fit, PLAIN, Gpt)[0].weights
    for got in pool2.run(train_with_stock_hook, PLAIN):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rings"}, "'shared_memory'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"peer_timeout": -1.0}, "peer_timeout=-1.0"),
        ({"uneven": "join"}, "'drop' or 'error'"),
        ({"start_method": "forkserver"}, "'spawn'"),
        ({"find_unused_parameters": True, "static_graph": True}, "static_graph=True"),
    ],
)
def test_a_wrong_option_is_refused_when_the_strategy_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lightning_llmscale.RingAllReduceStrategy(**options)


def test_sync_batchnorm_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(RefusedFeatureError, match="sync_batchnorm=True cannot take effect on CPU"):
        Trainer(strategy="ring_allreduce", accelerator="cpu", devices=2, sync_batchnorm=True, logger=False)
