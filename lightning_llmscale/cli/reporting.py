"""How a command reports that it failed: one sentence on standard error, printed once however many ranks fail."""

from __future__ import annotations

__all__ = ["Outcome", "fail", "report_errors"]

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_llmscale.errors import ConfigurationError, LlmscaleError


@dataclass
class Outcome:
    """The exit code of a command: 0 done, 1 the run failed, 2 the command line or the configuration is wrong."""

    code: int = 0


def fail(message: str, code: int = 2) -> int:
    """Prints `message` as one line on standard error and returns `code`."""
    sys.stderr.write(f"llmscale: error: {' '.join(message.split())}\n")
    sys.stderr.flush()
    return code


@contextmanager
def report_errors() -> Iterator[Outcome]:
    """Turns an error meant for the user into one sentence and an exit code; any other error keeps its traceback.

    The launched ranks of a host meet the same mistake at the same time, so only its first rank speaks. With
    ``LLMSCALE_DEBUG`` set every rank shows its traceback.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    outcome = Outcome()
    try:
        yield outcome
    except (LlmscaleError, MisconfigurationException, OSError) as error:
        if os.environ.get("LLMSCALE_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is None:
            raise  # not about a file of the user's, so the place in the code matters
        outcome.code = 2 if isinstance(error, (ConfigurationError, MisconfigurationException)) else 1
        if os.environ.get("LOCAL_RANK", "0") == "0":
            fail(_sentence(error), outcome.code)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, LlmscaleError):
        return f"{error.filename}: {error.strerror}; give a path this user can use."
    return str(error)
