"""Epoch metrics that are equal on all ranks, whoever logged them.

Lightning reduces each logged value by one collective per metric, in the order in which this rank first logged it.
Ranks that logged different metrics, or none because they had no batch, then wait for each other for ever or add up
different things. Here ranks first agree on the list of metrics; one that a rank never logged is filled in with its
neutral element.
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
    """A reduction over ranks that knows what it reduces. Lightning copies logged metrics deeply: not this."""

    def __init__(self, reduce: NamedReduce, what: str) -> None:
        self._reduce, self._what = reduce, what

    def __call__(self, value: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return self._reduce(value, group, reduce_op, what=self._what)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NamedReduction:
        return self


class AlignedResults(ResultCollection):
    """A loop's logged results, aligned over ranks before they are computed.

    Args:
        training: Whether the loop trains.
        reduce: Reduction over ranks that takes the metric's name as keyword `what`.
        phantom: Tells whether the current batch repeats a sample and must not count.
    """

    def __init__(self, training: bool, reduce: NamedReduce, phantom: Callable[[], bool]) -> None:
        super().__init__(training)
        self._reduce, self._phantom = reduce, phantom
        self._named: dict[str, _NamedReduction] = {}

    def _reduce_of(self, fx: str, name: str) -> _NamedReduction:
        # the same object each time: Lightning compares a metric's description with the one it stored
        what = f"the metric {name!r} logged in {fx}"
        return self._named.setdefault(what, _NamedReduction(self._reduce, what))

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As in Lightning; the reduction carries the metric's name, and a repeated sample weighs nothing."""
        kwargs["sync_dist_fn"] = self._reduce_of(fx, name)
        if self._phantom():
            kwargs["batch_size"] = 0
            if isinstance(value, Tensor) and kwargs.get("reduce_fx", torch.mean) in _ADDITIVE:
                value = torch.zeros_like(value)
        super().log(fx, name, value, *args, **kwargs)

    def align(self, exchange: Exchange, module: LightningModule) -> None:
        """Agree with the other ranks on the epoch metrics that need a reduction, and on their order (a collective)."""
        mine = [(key, _describe(item)) for key, item in self.valid_items() if _is_reduced(item)]
        answers = exchange("the list of epoch metrics", pickle.dumps((self.dataloader_idx, mine)))
        lists: list[tuple[int | None, list[tuple[str, dict[str, Any]]]]] = [pickle.loads(a) for a in answers]
        if all(other == lists[0] for other in lists):
            return
        self.dataloader_idx = next((index for index, _ in lists if index is not None), None)
        agreed = {key: description for _, described in lists for key, description in described}
        for key, description in agreed.items():
            item = self.pop(key, None)
            if item is None or item.has_reset:
                item = self._neutral(description, module)
            self[key] = item  # re-inserted: the order of keys is the order of reductions

    def _neutral(self, description: dict[str, Any], module: LightningModule) -> ResultMetric:
        meta = ResultMetadata(**description["meta"])
        meta.sync = ResultSync(
            fn=self._reduce_of(meta.fx, meta.name), _should=description["should"], _op=description["op"]
        )
        item = ResultMetric(meta, description["is_tensor"])
        if not description["is_tensor"]:
            metric = dict(module.named_modules())[meta.metric_attribute]
            if not isinstance(metric, Metric):
                raise TypeError(f"{meta.metric_attribute} is a {type(metric).__name__}, not a torchmetrics.Metric")
            item.value = metric
        item.to(module.device)
        item._update_count = 1
        item.has_reset = False
        return item


def _is_reduced(item: ResultMetric) -> bool:
    if not item.meta.on_epoch or item.meta.sync.rank_zero_only:
        return False
    return bool(item.meta.sync.should) or not item.is_tensor


def _describe(item: ResultMetric) -> dict[str, Any]:
    meta = item.meta
    return {
        "meta": {name: getattr(meta, name) for name in _META_FIELDS},
        "is_tensor": item.is_tensor,
        "should": meta.sync.should,
        "op": meta.sync.op,
    }
