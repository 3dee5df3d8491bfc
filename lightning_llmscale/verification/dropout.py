"""Dropout switched off, however a module calls it."""

from __future__ import annotations

__all__ = ["no_dropout"]

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

#: Module, function, argument that is the probability, and the position of that argument.
_FUNCTIONS: tuple[tuple[Any, str, str, int], ...] = (
    (nn.functional, "dropout", "p", 1),
    (nn.functional, "dropout1d", "p", 1),
    (nn.functional, "dropout2d", "p", 1),
    (nn.functional, "dropout3d", "p", 1),
    (nn.functional, "alpha_dropout", "p", 1),
    (nn.functional, "feature_alpha_dropout", "p", 1),
    (nn.functional, "scaled_dot_product_attention", "dropout_p", 4),
    (torch, "dropout", "p", 1),
)


@contextlib.contextmanager
def no_dropout(module: nn.Module) -> Iterator[None]:
    """Inside, dropout keeps all its inputs: that of torch's layers and of the functions of ``torch.nn.functional``.

    The functions are replaced where they are looked up, because a function mode of torch is not active inside
    ``backward``, where activation checkpointing runs the forward pass again. So a function that was imported by its own
    name (``from torch.nn.functional import dropout``) stays as it is.

    Args:
        module: Module whose recurrent layers, which call no function of their own, are changed too.
    """
    with contextlib.ExitStack() as stack:
        for owner, function, argument, position in _FUNCTIONS:
            original = getattr(owner, function)
            _set(stack, owner, function, _with_zero(original, argument, position))
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                _set(stack, layer, "dropout", 0.0)
        yield


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _with_zero(function: Callable[..., Any], argument: str, position: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def keeping_all(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[argument] = 0.0
        return function(*args, **kwargs)

    return keeping_all
