"""Errors a user may meet: each message gives the fact, the values and the remedy.

The command line prints these as one sentence without a traceback; everything else that escapes is a bug of ours.
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DataError",
    "LlmscaleError",
    "PeerFailureError",
    "RefusedFeatureError",
    "UnevenDataError",
    "VerificationError",
]


class LlmscaleError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigurationError(LlmscaleError, ValueError):
    """An option, or a combination of options, is wrong or cannot take effect."""


class RefusedFeatureError(ConfigurationError):
    """A Lightning feature that a strategy declares it cannot honour (see ``strategies.catalog``)."""


class DataError(LlmscaleError, ValueError):
    """A shard, an index or a sample cannot be used."""


class UnevenDataError(DataError):
    """Ranks hold different numbers of batches and ``uneven="error"`` was asked for."""


class PeerFailureError(LlmscaleError, RuntimeError):
    """Another rank died, left, raised or does something else; the message names it and what each was doing."""


class VerificationError(LlmscaleError, RuntimeError):
    """A run that ``verify`` needs failed or did not end in time, so there is nothing to compare."""
