"""One of the runs that `verify` compares, as a process: ``python -m lightning_llmscale.verification.worker JOB``.

Lightning's launcher starts the other ranks with the same command line, so everything a rank needs is in one file.
"""

from __future__ import annotations

__all__ = ["PHASES", "Job", "main"]

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_llmscale.errors import LlmscaleError
from lightning_llmscale.verification.isolation import Build, Runnable, plain_options, strategy_options
from lightning_llmscale.verification.replay import record, replay
from lightning_llmscale.verification.settings import Settings

Phase = Literal["strategy", "plain", "again"]
#: What each run is called in messages.
PHASES: dict[Phase, str] = {
    "strategy": "the run under the strategy",
    "plain": "the plain run",
    "again": "the second plain run",
}

_REPEAT_SEED = 20011
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """A run to do.

    Attributes:
        phase: ``strategy`` records the configured run, ``plain`` the reference, ``again`` the reference with another
            random state.
        build: ``module:function`` that builds the run, see :data:`~.isolation.Build`.
        arguments: Command line arguments for it.
        folder: Work folder; the recording goes to a folder in it that is named as the phase.
        settings: Steps, optimizer, dropout.
        path: ``sys.path`` of the calling process.
    """

    phase: Phase
    build: str
    arguments: list[str]
    folder: str
    settings: Settings
    path: list[str]

    def write(self, file: Path) -> None:
        """Stores the job as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Job:
        """Opposite of :meth:`write`."""
        content = json.loads(file.read_text())
        return cls(**{**content, "settings": Settings(**content["settings"])})


def main(file: str) -> int:
    """Does the job in ``file``.

    Returns:
        0, or 1 after an error, which is then also in ``<phase>.error.<rank>.json`` of the work folder.
    """
    job = Job.read(Path(file))
    sys.path.extend(entry for entry in job.path if entry not in sys.path)
    try:
        _run(job)
    except Exception as error:  # noqa: BLE001 whatever it is, the parent process shows it in one sentence
        traceback.print_exc()
        rank = os.environ.get("LOCAL_RANK", "0")
        meant = isinstance(error, (LlmscaleError, MisconfigurationException))
        content = {"kind": "" if meant else type(error).__name__, "message": str(error), "rank": int(rank)}
        (Path(job.folder) / f"{job.phase}.error.{rank}.json").write_text(json.dumps(content))
        return 1
    return 0


def _run(job: Job) -> None:
    folder = Path(job.folder)
    module, _, name = job.build.partition(":")
    build: Build = getattr(importlib.import_module(module), name)
    if job.phase == "strategy":
        run = build(job.arguments, strategy_options(folder))
        record(run, folder / "strategy", job.settings)
        _wait_for_ranks(run)
    else:
        run = build(job.arguments, plain_options(folder))
        seed = _REPEAT_SEED if job.phase == "again" else None
        replay(run, folder / "strategy", folder / job.phase, job.settings, seed=seed)


def _wait_for_ranks(run: Runnable) -> None:
    """Lets the ranks that Lightning started end by themselves: with this process, all of its group is ended."""
    for process in getattr(run.trainer.strategy.launcher, "procs", []):
        if isinstance(process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)


if __name__ == "__main__":
    # imported by its name, so that what is pickled for spawned ranks is found there
    sys.exit(importlib.import_module("lightning_llmscale.verification.worker").main(sys.argv[1]))
