"""How a command reports that it failed: one sentence on standard error, printed once however many ranks fail."""

from __future__ import annotations

__all__ = ["Outcome", "fail", "report_errors"]

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_llmscale.errors import ConfigurationError, LlmscaleError

# launchers end all ranks as soon as one has left, and the first must not be ended before it has spoken
_SECONDS_FOR_THE_FIRST_RANK = 2.0


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
    outcome = Outcome()
    try:
        yield outcome
    except KeyboardInterrupt:
        outcome.code = fail("interrupted.", 130)
    except Exception as error:
        meant = _for_the_user(error)
        if meant is None or os.environ.get("LLMSCALE_DEBUG"):
            raise
        sentence, outcome.code = meant
        if _is_first_rank_of_host():
            fail(sentence, outcome.code)
        else:
            time.sleep(_SECONDS_FOR_THE_FIRST_RANK)


def _is_first_rank_of_host() -> bool:
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return local_rank == "0"


def _for_the_user(error: Exception) -> tuple[str, int] | None:
    """Returns the sentence and the exit code of an error that is the user's to repair, ``None`` for any other."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    cause: BaseException | None = error
    while cause is not None:  # jsonargparse wraps what a constructor raises, with the types it tried after that
        if isinstance(cause, (LlmscaleError, MisconfigurationException)):
            return str(cause), 2 if isinstance(cause, (ConfigurationError, MisconfigurationException)) else 1
        cause = cause.__cause__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give a path that can be used (--debug shows where).", 1
    return None
