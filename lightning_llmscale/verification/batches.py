"""The batches of all replicas become the one batch a single process trains on."""

from __future__ import annotations

__all__ = ["JOIN_HOOK", "join_batches", "sample_count"]

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_llmscale.errors import ConfigurationError

#: Method of a LightningModule that joins batches verify cannot join by itself: ``(batches: list) -> batch``.
JOIN_HOOK = "llmscale_join_batches"
_REMEDY = f"; define `{JOIN_HOOK}(self, batches)` on the LightningModule to say how, or verify on data without it."


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenates batches of the same structure along their first axis, in the order given.

    Tensors and arrays are concatenated. Mappings, tuples, named tuples, dataclasses and lists are walked, except that a
    list of strings, numbers or None holds one entry per sample and is concatenated. Numbers, strings, None and tensors
    without axes describe the whole batch and must be equal.

    Args:
        batches: One batch per replica; at least one.

    Raises:
        ConfigurationError: If a part cannot be joined; names the place, the types and what to do.
    """
    return _join(list(batches), "batch") if len(batches) > 1 else batches[0]


def sample_count(batch: Any) -> int:
    """Samples in a batch: the first axis of its first tensor, or the length of its first list of samples, else 1."""
    found = _first_length(batch)
    return 1 if found is None else found


def _join(parts: list[Any], where: str) -> Any:
    first = parts[0]
    kinds = {type(part) for part in parts}
    if len(kinds) > 1 and not all(isinstance(part, Tensor) for part in parts):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigurationError(f"{where} is of different types on different ranks ({names}){_REMEDY}")
    if isinstance(first, Tensor):
        return _join_tensors(parts, where)
    if isinstance(first, np.ndarray):
        return torch.cat([torch.from_numpy(part) for part in parts]).numpy() if first.ndim else _same(parts, where)
    if first is None or isinstance(first, (str, bytes, Number)):
        return _same(parts, where)
    if isinstance(first, Mapping):
        return _join_mappings(parts, where)
    if dataclasses.is_dataclass(first):
        return _join_dataclasses(parts, where)
    if isinstance(first, (list, tuple)):
        return _join_sequences(parts, where)
    raise ConfigurationError(f"{where} is a {type(first).__name__}, which verify cannot join across ranks{_REMEDY}")


def _join_tensors(parts: list[Tensor], where: str) -> Tensor:
    if any(part.is_nested for part in parts):
        raise ConfigurationError(f"{where} is a nested tensor, which verify cannot join across ranks{_REMEDY}")
    if parts[0].ndim == 0:
        return _same(parts, where)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ConfigurationError(
            f"{where} has the shapes {shapes} on the ranks, which differ beyond the first axis: pad to a fixed length "
            f"while verifying{_REMEDY}"
        )
    return torch.cat(parts)


def _same(parts: list[Any], where: str) -> Any:
    first = parts[0]
    for part in parts[1:]:
        if not bool(np.all(np.asarray(part == first))):
            raise ConfigurationError(
                f"{where} describes a whole batch and differs between ranks ({first!r}, {part!r}), so it cannot be "
                f"joined{_REMEDY}"
            )
    return first


def _join_mappings(parts: list[Mapping[Any, Any]], where: str) -> Any:
    first = parts[0]
    for part in parts[1:]:
        if set(part) != set(first):
            odd = sorted(map(str, set(part) ^ set(first)))
            raise ConfigurationError(f"{where} has the keys {', '.join(odd)} on some ranks only{_REMEDY}")
    joined = {key: _join([part[key] for part in parts], f"{where}[{key!r}]") for key in first}
    if isinstance(first, defaultdict):
        return defaultdict(first.default_factory, joined)
    return joined if type(first) is dict else type(first)(OrderedDict(joined))  # type: ignore[call-arg]


def _join_dataclasses(parts: list[Any], where: str) -> Any:
    joined = copy.copy(parts[0])
    for field in dataclasses.fields(joined):
        value = _join([getattr(part, field.name) for part in parts], f"{where}.{field.name}")
        object.__setattr__(joined, field.name, value)  # also for a frozen dataclass
    return joined


def _join_sequences(parts: list[Any], where: str) -> Any:
    first = parts[0]
    named = isinstance(first, tuple) and hasattr(first, "_fields")
    if not named and all(_one_entry_per_sample(part) for part in parts):
        return type(first)(entry for part in parts for entry in part)
    if len({len(part) for part in parts}) > 1:
        lengths = ", ".join(str(len(part)) for part in parts)
        raise ConfigurationError(f"{where} is a {type(first).__name__} of lengths {lengths} on the ranks{_REMEDY}")
    joined = [_join(list(column), f"{where}[{index}]") for index, column in enumerate(zip(*parts, strict=True))]
    return type(first)(*joined) if named else type(first)(joined)


def _one_entry_per_sample(part: Sequence[Any]) -> bool:
    return len(part) > 0 and all(entry is None or isinstance(entry, (str, bytes, Number)) for entry in part)


def _first_length(part: Any) -> int | None:
    if isinstance(part, (Tensor, np.ndarray)):
        return len(part) if part.ndim else None
    if isinstance(part, (list, tuple)) and not hasattr(part, "_fields") and _one_entry_per_sample(part):
        return len(part)
    children: Sequence[Any] = ()
    if isinstance(part, Mapping):
        children = list(part.values())
    elif dataclasses.is_dataclass(part):
        children = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif isinstance(part, (list, tuple)):
        children = part
    return next((found for child in children if (found := _first_length(child)) is not None), None)
