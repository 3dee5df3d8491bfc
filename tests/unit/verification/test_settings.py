"""Options of verify: what is out of range or could not take effect is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_llmscale.errors import ConfigurationError
from lightning_llmscale.verification import Settings
from lightning_llmscale.verification.settings import default_tolerance


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"optimizer": "adam"}, "'sgd' or 'user'"),
        ({"optimizer": "user", "lr": 0.1}, "cannot take effect"),
        ({"lr": 0.0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"tolerance": -1.0}, "tolerance=-1"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Settings(**options)


@pytest.mark.parametrize(
    ("precision", "optimizer", "reduced", "tolerance"),
    [
        ("32-true", "sgd", False, 1e-5),
        ("32-true", "user", False, 1e-4),
        ("32-true", "sgd", True, 1e-3),
        ("64-true", "sgd", True, 1e-10),
        ("bf16-mixed", "sgd", False, 5e-2),
        ("transformer-engine", "sgd", False, 0.25),
    ],
)
def test_tolerance_follows_the_precision(precision: str, optimizer: Any, reduced: bool, tolerance: float) -> None:
    assert default_tolerance(precision, optimizer, reduced) == pytest.approx(tolerance)
