"""RingAllReduceStrategy's own options: every algorithm gives the result of one process."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

import lightning_llmscale
from lightning_llmscale.errors import ConfigurationError, RefusedFeatureError
from tests.conformance.harness import Conformance
from tests.conformance.jobs import StrategySpec
from tests.conformance.models import Gpt
from tests.support.pool import RankPool

PATH = "lightning_llmscale.RingAllReduceStrategy"
truths: dict[bytes, Any] = {}


def conformance(pool: RankPool, oracle: RankPool, **options: Any) -> Conformance:
    return Conformance(StrategySpec(PATH, options), pool, oracle, truths, refusal=None)


@pytest.mark.parametrize("algorithm", ["stock", "ring", "direct", "shared_memory"])
def test_algorithm_on_two_ranks(pool1: RankPool, pool2: RankPool, algorithm: str) -> None:
    conformance(pool2, pool1, algorithm=algorithm).same_training(Gpt)


@pytest.mark.parametrize("algorithm", ["ring", "shared_memory"])
def test_algorithm_on_four_ranks_in_small_buckets(pool1: RankPool, pool4: RankPool, algorithm: str) -> None:
    conformance(pool4, pool1, algorithm=algorithm, bucket_cap_mb=0.001).same_training(Gpt)


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 0.02), ("int8", 0.05)])
def test_a_lossy_wire_stays_near_one_process(pool1: RankPool, pool2: RankPool, wire: str, tolerance: float) -> None:
    conformance(pool2, pool1, wire=wire).same_training(Gpt, tolerance=tolerance)


def test_static_graph(pool1: RankPool, pool2: RankPool) -> None:
    conformance(pool2, pool1, static_graph=True).same_training(Gpt)


class AsOnGpu(lightning_llmscale.RingAllReduceStrategy):
    """Takes the way of GPUs, whose gradients the process group sums, here over gloo."""

    def _open_own(self, model: DistributedDataParallel) -> Any:
        return self._open_stock(model)


def test_gradients_left_to_the_process_group(pool1: RankPool, pool2: RankPool) -> None:
    spec = StrategySpec(f"{__name__}.AsOnGpu", {"algorithm": "stock"})
    Conformance(spec, pool2, pool1, truths, refusal=None).same_training(Gpt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rings"}, "'shared_memory'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"wire": "int4"}, "'int8'"),
        ({"error_feedback": True}, "drops nothing"),
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
