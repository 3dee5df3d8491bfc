"""`llmscale verify`: prints whether a strategy gives the same result as one plain process."""

from __future__ import annotations

__all__ = ["run"]

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_llmscale.errors import ConfigurationError, LlmscaleError
from lightning_llmscale.verification.isolation import Build
from lightning_llmscale.verification.report import Report
from lightning_llmscale.verification.settings import DEFAULT_LR, Settings
from lightning_llmscale.verification.verify import verify

_DESCRIPTION = """\
Trains your module a few steps in one plain Lightning process and again under the configured strategy, on the same
global batches, and prints the largest difference of losses, gradients, weights and buffers, with the first that
differs. Everything else on the line (--config, --trainer..., --model..., --data...) means what it means for
`llmscale fit`. Callbacks, loggers, checkpoints, validation and dropout are switched off."""
_EPILOG = """\
exit code: 0 equal, 1 different, 2 the runs could not be set up or did not end

examples:
  llmscale verify --config run.yaml
  llmscale verify --config run.yaml --trainer.devices=4 --steps 4 --json verify.json
"""


def run(args: Sequence[str], build: Build) -> int:
    """Verifies the configuration given on a command line.

    Args:
        args: Arguments after ``verify``; those that are not its own go to ``build``.
        build: Builds trainer, module and data from them.

    Returns:
        0 if the runs are equal within the tolerance, 1 if not, 2 if they could not be set up or compared, failed, or
        did not end in time; the reason is then one sentence on standard error.

    Raises:
        SystemExit: With code 2 if an option of `verify` itself is wrong, with 0 after ``--help``.
    """
    options, rest = _parser().parse_known_args(list(args))
    try:
        report = _verify(options, rest, build)
    except LlmscaleError as error:
        # every error is 2 here, also that of a failed run, because 1 means that the runs differ
        print(f"llmscale verify: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(report.table())
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    return 0 if report.passed else 1


def _verify(options: argparse.Namespace, rest: list[str], build: Build) -> Report:
    if not rest:
        raise ConfigurationError("there is nothing to verify: name a run, for example --config run.yaml.")
    settings = Settings(
        steps=options.steps,
        optimizer=options.optimizer,
        lr=options.lr,
        tolerance=options.tolerance,
        keep_dropout=options.keep_dropout,
    )
    _check_writable(options.json)
    progress = _Progress()
    try:
        return verify(build, rest, settings, folder=options.keep, timeout=options.timeout, progress=progress)
    finally:
        progress.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmscale verify",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run (default: 8)")
    parser.add_argument(
        "--optimizer",
        choices=["sgd", "user"],
        default="sgd",
        help="sgd (default) shows a wrong gradient scale, which AdamW hides; user keeps the module's own optimizers "
        "and schedules",
    )
    parser.add_argument("--lr", type=float, help=f"learning rate of sgd (default: {DEFAULT_LR:g})")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that counts as equal (default: 1e-5 in fp32, 1e-10 in fp64, looser in 16 "
        "bits; ten times that with --optimizer user)",
    )
    parser.add_argument("--keep-dropout", action="store_true", help="leave dropout on (ranks draw other masks)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds each run may take (default: 600)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep recordings and output of the runs there")
    return parser


def _check_writable(file: Path | None) -> None:
    """Finds out before the runs, not after them."""
    if file is None:
        return
    if file.is_dir() or not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
        raise ConfigurationError(f"--json {file} cannot be written: name a file in an existing, writable folder.")


class _Progress:
    """One line on stderr that is rewritten on a terminal, and printed once per kind of event elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def __call__(self, line: str) -> None:
        if line == self._last:
            return
        if self._terminal:
            sys.stderr.write(f"\r\033[K{line}")
        elif line.partition(":")[0] != self._last.partition(":")[0]:
            sys.stderr.write(line.partition(":")[0] + "\n")
        self._last = line
        sys.stderr.flush()

    def close(self) -> None:
        """Removes the line."""
        if self._terminal and self._last:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
