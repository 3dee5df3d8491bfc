"""One strategy of the catalogue on one world size, compared with plain Lightning in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.conformance.jobs import PLAIN, Fit, StrategySpec, fit
from tests.conformance.models import Base
from tests.support.pool import RankPool, RemoteError

__all__ = ["SGD_TOLERANCE", "Conformance", "RefusedAsDeclared", "assert_close", "assert_same_weights"]

#: Relative to the largest value of a tensor; 30 times the largest difference that float32 summation order makes.
SGD_TOLERANCE = 1e-5
#: Smallest scale that differences are relative to.
FLOOR = 1e-3


class RefusedAsDeclared(Exception):
    """The strategy refused the feature on every rank in the words of its catalogue entry: the test has passed."""


class Conformance:
    """Runs jobs under the strategy and under plain Lightning.

    Args:
        strategy: The strategy under test.
        pool: The ranks to run it on.
        oracle: One process for plain Lightning.
        truths: Results of plain Lightning so far, shared by all tests of a session.
        refusal: The message with which the strategy must refuse the feature of this test, if it refuses it.
    """

    def __init__(
        self,
        strategy: StrategySpec,
        pool: RankPool,
        oracle: RankPool,
        truths: dict[bytes, Any],
        refusal: str | None,
    ) -> None:
        self.strategy = strategy
        self.pool = pool
        self.world_size = pool.world_size
        self._oracle = oracle
        self._truths = truths
        self._refusal = refusal

    def with_options(self, **options: Any) -> Conformance:
        """The same strategy built with other options."""
        strategy = StrategySpec(self.strategy.class_path, {**self.strategy.options, **options})
        return Conformance(strategy, self.pool, self._oracle, self._truths, self._refusal)

    def ranks(self, job: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run ``job(strategy, *args)`` on every rank and return the results by rank.

        Raises:
            RefusedAsDeclared: The strategy declares that it refuses the feature, and did so on every rank.
        """
        if self._refusal is not None:
            self.refused(self._refusal, job, *args, timeout=timeout)
            raise RefusedAsDeclared(self._refusal)
        return self.pool.run(job, self.strategy, *args, timeout=timeout)

    def refused(self, message: str, job: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[RemoteError]:
        """Run a job that must raise an error with ``message`` in it on every rank."""
        errors = self.pool.errors(job, self.strategy, *args, timeout=timeout)
        for rank, error in enumerate(errors):
            assert message in error.message, (
                f"rank {rank} raised {error.classes[0]}: {error.message}\nexpected {message!r}"
            )
        return errors

    def plain(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run the job under plain Lightning in one process; the result is kept for the session."""
        key = pickle.dumps((job, args))
        if key not in self._truths:
            self._truths[key] = self._oracle.run(job, PLAIN, *args)[0]
        return self._truths[key]

    def same_training(
        self,
        kind: type[Base],
        module: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        *,
        tolerance: float = SGD_TOLERANCE,
        floor: float = FLOOR,
        losses: bool = True,
    ) -> list[Fit]:
        """Train under the strategy and under plain Lightning, and compare the loss curve, the weights and the steps.

        Args:
            kind: The module.
            module: Arguments of the module.
            trainer: Arguments of the trainer.
            tolerance: Largest difference relative to the largest value of a tensor.
            floor: The least that largest value is taken as.
            losses: Compare the losses too; each rank's loss must then be of equally many samples.

        Returns:
            The results by rank.
        """
        got: list[Fit] = self.ranks(fit, kind, module, trainer)
        want: Fit = self.plain(fit, kind, module, trainer)
        if losses:
            curves = torch.tensor([result.losses for result in got if result.losses], dtype=torch.float64)
            assert_close(curves.mean(0), torch.tensor(want.losses, dtype=torch.float64), "losses", tolerance)
        for rank, result in enumerate(got):
            assert result.steps == want.steps, f"rank {rank} made {result.steps} steps, one process {want.steps}"
        assert_same_weights(got[0].weights, want.weights, tolerance, floor)
        assert_ranks_agree(got)
        return got


def assert_close(got: Tensor, want: Tensor, what: str, tolerance: float = SGD_TOLERANCE, floor: float = FLOOR) -> None:
    """Compare relative to the largest value of ``want``, taken as at least ``floor``."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, one process has {tuple(want.shape)}"
    if want.numel() == 0:
        return
    got, want = got.double(), want.double()
    difference = (got - want).abs().max().item() / max(want.abs().max().item(), floor)
    first = f"first values {got.flatten()[:6].tolist()}, one process {want.flatten()[:6].tolist()}"
    assert difference <= tolerance, f"{what}: relative difference {difference:.3g} > {tolerance:g}; {first}"


def assert_same_weights(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = SGD_TOLERANCE, floor: float = FLOOR
) -> None:
    """Compare two state dicts by name."""
    assert set(got) == set(want), f"names only on one side: {sorted(set(got) ^ set(want))}"
    for name, value in want.items():
        assert_close(got[name], value, name, tolerance, floor)


def assert_ranks_agree(results: list[Fit]) -> None:
    """Ranks that hold the whole model hold the same bits."""
    first = results[0].local
    for rank, result in enumerate(results):
        whole = {name: value.shape for name, value in result.local.items()} == {n: v.shape for n, v in first.items()}
        for name, value in result.local.items() if whole else ():
            assert torch.equal(value, first[name]), f"{name} of rank {rank} differs from that of rank 0"
