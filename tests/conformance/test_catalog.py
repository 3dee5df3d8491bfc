"""What the catalogue says of its strategies is what the tests ask about."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_llmscale.strategies.catalog import STRATEGIES
from tests.conformance.features import FEATURES

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


@pytest.mark.parametrize("name", STRATEGIES)
def test_entries_refuse_known_features_in_a_sentence(name: str) -> None:
    entry = STRATEGIES[name]
    assert entry.name == name
    assert set(entry.refuses) <= set(FEATURES)
    for message in entry.refuses.values():
        assert len(message) > 20
    assert entry.load().__name__ == entry.class_path.rpartition(".")[2]


def test_every_feature_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [f"| `{name}` | {what} |" for name, what in FEATURES.items() if f"| `{name}` | {what} |" not in text] == []
