"""The README's commands are those that CI runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith("-m pytest")]
    assert len(lines) == 1, "CI runs the one line of the README that ends in pytest"
    assert lines[0].startswith("python3 -m venv .venv && ")
    assert "eval \"$(grep -- '-m pytest$' README.md)\"" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
