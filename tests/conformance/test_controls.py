"""An oracle that cannot fail proves nothing: planted faults must be found."""

from __future__ import annotations

import pytest

from tests.conformance import faults
from tests.conformance.harness import Conformance, RefusedAsDeclared
from tests.conformance.jobs import StrategySpec, fit
from tests.conformance.models import Mlp
from tests.support.pool import RankPool, RanksFailed


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (faults.SumsGradients, "relative difference"),
        (faults.DriftsOnRank1, "of rank 1 differs from that of rank 0"),
        (faults.Shuffles, "relative difference"),
    ],
)
def test_planted_faults_are_found(pool1: RankPool, pool2: RankPool, fault: type, found: str) -> None:
    strategy = StrategySpec(f"{fault.__module__}.{fault.__qualname__}")
    conformance = Conformance(strategy, pool2, pool1, {}, refusal=None)
    with pytest.raises(AssertionError, match=found):
        conformance.same_training(Mlp)


def test_a_declared_refusal_must_come_on_every_rank_in_the_declared_words(pool1: RankPool, pool2: RankPool) -> None:
    strategy = StrategySpec("lightning_llmscale.RingAllReduceStrategy", {"bucket_cap_mb": 0})
    with pytest.raises(RefusedAsDeclared):
        Conformance(strategy, pool2, pool1, {}, refusal="bucket_cap_mb=0 is no size").ranks(fit, Mlp)
    with pytest.raises(AssertionError, match="expected 'in other words'"):
        Conformance(strategy, pool2, pool1, {}, refusal="in other words").ranks(fit, Mlp)
    works = StrategySpec("lightning_llmscale.RingAllReduceStrategy")
    with pytest.raises(RanksFailed, match="did not raise on every rank"):
        Conformance(works, pool2, pool1, {}, refusal="but it works").ranks(fit, Mlp)
