"""The README's commands are those that CI runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.endswith("-m pytest"))
    script = (ROOT / ".ci" / "run").read_text()
    steps = [step.strip().replace(".venv/", ".venv-ci/") for step in line.split("&&")]
    assert steps[0].replace(".venv", ".venv-ci") in script
    assert steps[1].replace("pip install", "pip install --quiet") in script
    assert script.strip().endswith(steps[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
