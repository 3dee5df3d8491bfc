"""Logged metrics that are equal on all ranks and equal to those of one process.

Lightning reduces each value logged with ``sync_dist=True`` by one collective per metric, in the order in which this
rank first logged it, and leaves the others as each rank saw them. Ranks that logged different metrics, or none because
they had no batch, then wait for each other for ever; monitors see other values on other ranks.

Here every epoch metric is reduced, whether the user thought of ``sync_dist`` or not. Ranks first agree on the list; a
metric that a rank never logged is filled in with its neutral element. Values per step are combined when loggers record
them, in one exchange for all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_llmscale._compat import ResultCollection, ResultMetadata, ResultMetric, ResultSync

__all__ = ["AlignedResults"]

Exchange = Callable[[str, bytes], list[bytes]]
NamedReduce = Callable[..., Tensor]
_ADDITIVE = (torch.mean, torch.sum, sum, "mean", "avg", "sum")
_META_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph",
                "add_dataloader_idx", "dataloader_idx", "metric_attribute")  # fmt: skip


class _NamedReduction:
    """A reduction over ranks that knows what it reduces. Lightning copies logged metrics deeply: not this.

    Args:
        reduce: The strategy's reduction.
        what: Name of the value, for messages.
        within_steps: Whether a value is also reduced at each step, as ``sync_dist=True`` asks for.
        in_step: Tells whether a step is running.
    """

    def __init__(self, reduce: NamedReduce, what: str, within_steps: bool, in_step: Callable[[], bool]) -> None:
        self._reduce, self._what, self.within_steps, self._in_step = reduce, what, within_steps, in_step

    def __call__(self, value: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        if not self.within_steps and self._in_step():
            return value
        return self._reduce(value, group, reduce_op, what=self._what)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NamedReduction:
        return self


class AlignedResults(ResultCollection):
    """A loop's logged results, aligned over ranks before they are computed.

    Args:
        training: Whether the loop trains.
        reduce: Reduction over ranks that takes the metric's name as keyword `what`.
        share: How much this rank's values count in the running step (1 in the usual case, 0 for a repeated sample that
            must not count), or None between steps.
    """

    def __init__(self, training: bool, reduce: NamedReduce, share: Callable[[], float | None]) -> None:
        super().__init__(training)
        self._reduce, self._share = reduce, share
        self._named: dict[tuple[str, bool], _NamedReduction] = {}

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As in Lightning; epoch values are always reduced, and a repeated sample weighs nothing."""
        asked = bool(kwargs.get("sync_dist"))
        kwargs["sync_dist_fn"] = self._reduction(fx, name, within_steps=asked)
        if kwargs.get("on_epoch", True) and not kwargs.get("rank_zero_only") and kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist"] = True
        if self._share() == 0.0:
            kwargs["batch_size"] = 0
            if isinstance(value, Tensor) and kwargs.get("reduce_fx", torch.mean) in _ADDITIVE:
                value = torch.zeros_like(value)
        super().log(fx, name, value, *args, **kwargs)

    def align(self, exchange: Exchange, module: LightningModule) -> None:
        """Compute the epoch metrics logged so far, equal on all ranks (a collective)."""
        mine = [(key, _describe(item)) for key, item in self.valid_items() if _is_reduced(item)]
        answers = exchange("the list of epoch metrics", pickle.dumps((self.dataloader_idx, mine)))
        if any(answer != answers[0] for answer in answers):
            self._complete([pickle.loads(answer) for answer in answers], module)
        # now, on all ranks: later readers, such as a progress bar on rank 0 alone, find the values and need no one
        self.metrics(on_step=False)

    def share_step(self, exchange: Exchange, share: float) -> None:
        """Replace the values of this step by those of the whole global batch (a collective)."""
        items = {key: item for key, item in self.valid_items() if _is_local(item)}
        mine = {key: (float(item._forward_cache), item.meta.reduce_fx.__name__) for key, item in items.items()}
        answers = [pickle.loads(a) for a in exchange("the values logged in this step", pickle.dumps((share, mine)))]
        for key, item in items.items():
            held = [(weight, values[key][0]) for weight, values in answers if key in values and weight > 0]
            if held:
                whole = _combine(held, item.meta.reduce_fx.__name__)
                item._forward_cache = torch.full_like(item._forward_cache, whole)

    def _reduction(self, fx: str, name: str, within_steps: bool) -> _NamedReduction:
        # the same object each time: Lightning compares a metric's description with the one it stored
        key = (f"the metric {name!r} logged in {fx}", within_steps)
        if key not in self._named:
            self._named[key] = _NamedReduction(self._reduce, *key, lambda: self._share() is not None)
        return self._named[key]

    def _complete(self, lists: list[tuple[int | None, list[tuple[str, Any]]]], module: LightningModule) -> None:
        """Bring the metrics of all ranks into one order, with neutral elements for those this rank lacks."""
        self.dataloader_idx = next((index for index, _ in lists if index is not None), None)
        agreed = {key: description for _, described in lists for key, description in described}
        for key, description in agreed.items():
            item = self.pop(key, None)
            if item is None or item.has_reset:
                item = self._neutral(description, module)
            self[key] = item  # re-inserted: the order of keys is the order of reductions

    def _neutral(self, description: dict[str, Any], module: LightningModule) -> ResultMetric:
        meta = ResultMetadata(**description["meta"])
        reduction = self._reduction(meta.fx, meta.name, description["within_steps"])
        meta.sync = ResultSync(fn=reduction, _should=description["should"], _op=description["op"])
        item = ResultMetric(meta, description["is_tensor"])
        if not description["is_tensor"]:
            metric = dict(module.named_modules())[meta.metric_attribute]
            if not isinstance(metric, Metric):
                raise TypeError(f"{meta.metric_attribute} is a {type(metric).__name__}, not a torchmetrics.Metric")
            item.value = metric
        item.to(module.device)
        if description["dtype"] is not None:
            item.value = item.value.to(description["dtype"])
        item._update_count = 1
        item.has_reset = False
        return item


def _is_reduced(item: ResultMetric) -> bool:
    if not item.meta.on_epoch or item.meta.sync.rank_zero_only:
        return False
    return bool(item.meta.sync.should) or not item.is_tensor


def _is_local(item: ResultMetric) -> bool:
    """Whether the item's value of this step is still this rank's own."""
    sync = item.meta.sync
    if not item.is_tensor or not item.meta.on_step or sync.rank_zero_only or item._forward_cache is None:
        return False
    return not (sync.should and _within_steps(item)) and item._forward_cache.numel() == 1


def _within_steps(item: ResultMetric) -> bool:
    return isinstance(item.meta.sync.fn, _NamedReduction) and item.meta.sync.fn.within_steps


def _combine(held: list[tuple[float, float]], reduce_fx: str) -> float:
    values = [value for _, value in held]
    if reduce_fx == "mean":
        return sum(weight * value for weight, value in held) / sum(weight for weight, _ in held)
    combine: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
    return combine[reduce_fx](values)


def _describe(item: ResultMetric) -> dict[str, Any]:
    meta = item.meta
    return {
        "meta": {name: getattr(meta, name) for name in _META_FIELDS},
        "is_tensor": item.is_tensor,
        "dtype": item.value.dtype if item.is_tensor else None,
        "should": meta.sync.should,
        "op": meta.sync.op,
        "within_steps": _within_steps(item),
    }
