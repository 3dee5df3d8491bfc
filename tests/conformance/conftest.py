"""Every test of this folder runs for each strategy of the catalogue, on two processes and in the long tier on four."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from lightning_llmscale.strategies.catalog import STRATEGIES
from tests.conformance.features import FEATURES
from tests.conformance.harness import Conformance, RefusedAsDeclared
from tests.conformance.jobs import StrategySpec
from tests.support.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "feature(name): the Lightning feature that the test needs; a catalogue entry may refuse it"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance" not in metafunc.fixturenames:
        return
    metafunc.parametrize("strategy_name", sorted(STRATEGIES))
    metafunc.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)], ids="{}ranks".format)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except RefusedAsDeclared:
        return True


@pytest.fixture(scope="session")
def truths() -> dict[bytes, Any]:
    """Results of plain Lightning, by job."""
    return {}


@pytest.fixture
def conformance(
    request: pytest.FixtureRequest,
    strategy_name: str,
    world_size: int,
    pool1: RankPool,
    pool2: RankPool,
    pool4: RankPool,
    truths: dict[bytes, Any],
) -> Conformance:
    """The strategy and the ranks of this test."""
    entry = STRATEGIES[strategy_name]
    marker = request.node.get_closest_marker("feature")
    assert marker is not None, "a conformance test says which feature it needs: @pytest.mark.feature(name)"
    assert marker.args[0] in FEATURES, f"{marker.args[0]!r} is not listed in tests/conformance/features.py"
    refusal = entry.refuses.get(marker.args[0])
    return Conformance(StrategySpec(entry.class_path), {2: pool2, 4: pool4}[world_size], pool1, truths, refusal)
