"""Runs a configuration under its strategy and plainly, in processes of their own, and compares the two."""

from __future__ import annotations

__all__ = ["verify"]

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_llmscale.errors import ConfigurationError, VerificationError
from lightning_llmscale.verification.compare import compare
from lightning_llmscale.verification.diagnosis import explain_randomness
from lightning_llmscale.verification.isolation import Build
from lightning_llmscale.verification.report import Report
from lightning_llmscale.verification.settings import Settings
from lightning_llmscale.verification.worker import PHASES, Job, Phase

_POLL_SECONDS = 0.1
#: How long the other ranks may take to end after one reported an error.
_GRACE_SECONDS = 20.0
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def verify(
    build: Build,
    arguments: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    folder: Path | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Trains a module under a strategy and in one plain process on the same batches, and compares the two.

    Args:
        build: Builds the run; a function of an importable module, because each process imports it by name.
        arguments: Passed to ``build``.
        settings: Steps, optimizer, tolerance.
        folder: Where the recordings stay; by default a temporary folder that is removed.
        timeout: Seconds that each of the two runs may take.
        progress: Called with a short line whenever something moves.

    Raises:
        ConfigurationError: If the runs cannot be set up or compared.
        VerificationError: If a run fails or does not end in time.
    """
    settings = settings or Settings()
    if not 0 < timeout < float("inf"):
        raise ConfigurationError(f"timeout={timeout:g}: give the seconds that a run may take, for example 600.")
    launched = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    if launched:
        raise ConfigurationError(
            f"verify was started by a launcher ({launched[0]} is set) but starts its own processes: run it once, "
            "without torchrun."
        )
    with _work_folder(folder) as work:
        runs = _Runs(_import_path(build), list(arguments), work, settings, timeout, progress)
        runs.run("strategy")
        runs.run("plain")
        progress("comparing")
        report = compare(work / "strategy", work / "plain", settings)
        if report.first is not None and report.first.quantity in ("loss", "gradients", "weights", "buffers"):
            report = _explain(report, runs)
        return report


def _explain(report: Report, runs: _Runs) -> Report:
    """Repeats the plain run with another random state: a module that differs from itself proves nothing."""
    runs.run("again")
    repeated = compare(runs.folder / "again", runs.folder / "plain", runs.settings)
    if repeated.passed:
        return report
    apart = max(largest.difference for largest in repeated.largest.values())
    return dataclasses.replace(report, hints=[explain_randomness(apart)])


@contextlib.contextmanager
def _work_folder(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="llmscale-verify-") as temporary:
            yield Path(temporary)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = any(folder.iterdir()) and not (folder / _job_file("strategy")).exists()
    except OSError as error:
        raise ConfigurationError(f"the folder {folder} cannot be used for the recordings: {error}.") from error
    if strange:
        raise ConfigurationError(
            f"the folder {folder} holds other things than recordings of verify, which replaces what it finds: name a "
            "new or empty folder."
        )
    for phase in PHASES:
        shutil.rmtree(folder / phase, ignore_errors=True)
    yield folder.resolve()


def _job_file(phase: Phase) -> str:
    return f"{phase}.job.json"


def _import_path(build: Build) -> str:
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", "<unknown>")
    if not module or module == "__main__" or "<" in name or "." in name:
        raise ConfigurationError(
            f"the build function {name} of {module} cannot be imported by other processes: define it at the top level "
            "of a module, not in the script that is run."
        )
    return f"{module}:{name}"


class _Runs:
    """Starts the runs one after the other, each with a deadline."""

    def __init__(
        self,
        build: str,
        arguments: list[str],
        folder: Path,
        settings: Settings,
        timeout: float,
        progress: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.settings = settings
        self._build = build
        self._arguments = arguments
        self._timeout = timeout
        self._progress = progress

    def run(self, phase: Phase) -> None:
        """Does one run and returns when its recording is complete."""
        for old in self.folder.glob(f"{phase}.error.*.json"):
            old.unlink()
        job = self.folder / _job_file(phase)
        Job(phase, self._build, self._arguments, str(self.folder), self.settings, list(sys.path)).write(job)
        command = [sys.executable, "-m", "lightning_llmscale.verification.worker", str(job)]
        with (self.folder / f"{phase}.log").open("w") as log:
            # a session of its own, so that all ranks can be ended together
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                self._wait(phase, process)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            raise self._failure(phase, f"ended with exit code {process.returncode}")

    def _wait(self, phase: Phase, process: subprocess.Popen[bytes]) -> None:
        started, failed = time.monotonic(), None
        while process.poll() is None:
            now = time.monotonic()
            if now - started > self._timeout:
                raise self._failure(phase, f"did not end within {self._timeout:g} s (raise --timeout if it is slow)")
            if failed is None and any(self.folder.glob(f"{phase}.error.*.json")):
                failed = now
            if failed is not None and now - failed > _GRACE_SECONDS:
                raise self._failure(phase, "failed")
            done = len(list((self.folder / phase).glob("rank0/gradients*.pt")))
            self._progress(
                f"{PHASES[phase]}: step {done} of {self.settings.steps}" if done else f"{PHASES[phase]}: starting"
            )
            time.sleep(_POLL_SECONDS)

    def _failure(self, phase: Phase, end: str) -> VerificationError:
        """Says in one sentence why a run failed: its own error, else the last error line of its output."""
        errors = [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{phase}.error.*.json"))]
        if errors:
            # an error meant for users says all by itself; of any other the class and the rank matter
            first = next((error for error in errors if not error["kind"]), errors[0])
            where = f" on rank {first['rank']} with {first['kind']}" if first["kind"] else ""
            return VerificationError(f"{PHASES[phase]} failed{where}: {' '.join(first['message'].split())}")
        lines = [line.strip() for line in (self.folder / f"{phase}.log").read_text(errors="replace").splitlines()]
        said = next((line.partition(": error: ")[2] for line in lines if ": error: " in line), None)
        if said:  # by the command line's parser
            return VerificationError(said)
        telling = [line for line in lines if "Error" in line] or [line for line in lines if line]
        return VerificationError(f"{PHASES[phase]} {end}" + (f"; its last words: {telling[-1]}" if telling else "."))
