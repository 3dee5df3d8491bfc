"""Share the shards of a user's own ``webdataset`` pipeline among replicas.

A plain ``wds.WebDataset`` refuses to run on several ranks, and one made with ``nodesplitter=None`` lets every rank read
everything. Under a strategy of this package the first is split over the replicas, the second is refused with the line
to add; a pipeline that splits by itself is left alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_llmscale.errors import ConfigurationError

__all__ = ["share_webdataset"]


def share_webdataset(loader: Any, *, replicas: int, replica: int) -> None:
    """Split the shards of the pipelines inside `loader`, in place.

    Args:
        loader: Any iterable; only ``webdataset`` pipelines and torch loaders around them are looked into.
        replicas: Number of data replicas.
        replica: Index of this one.

    Raises:
        ConfigurationError: If a pipeline gives every rank every shard.
    """
    if "webdataset" not in sys.modules:
        return
    from webdataset import shardlists
    from webdataset.pipeline import DataPipeline

    for pipeline in _pipelines(loader, DataPipeline):
        stages = pipeline.pipeline
        listed = [
            stage for stage in stages if isinstance(stage, (shardlists.SimpleShardList, shardlists.MultiShardSample))
        ]
        if shardlists.single_node_only in stages:
            stages[stages.index(shardlists.single_node_only)] = partial(take_every, replicas, replica)
        elif listed and not any(_splits(stage) for stage in stages):
            raise ConfigurationError(
                f"this WebDataset pipeline gives each of {replicas} ranks every shard; add "
                "nodesplitter=wds.split_by_node (or let WebDatasetDataModule read the shards), or set "
                "Trainer(use_distributed_sampler=False) if it splits samples by itself"
            )


def take_every(step: int, start: int, source: Iterator[Any]) -> Iterator[Any]:
    """Every `step`-th element of `source`, from element `start` on."""
    return itertools.islice(source, start, None, step)


def _splits(stage: Any) -> bool:
    """Whether a stage shares shards among ranks: webdataset's own splitter, or ours from an earlier look."""
    function = stage.func if isinstance(stage, partial) else stage
    return function is take_every or "split_by_node" in getattr(function, "__name__", "")


def _pipelines(holder: Any, kind: type[Any]) -> Iterator[Any]:
    """The pipelines in a loader, from the outside in."""
    if isinstance(holder, DataLoader):
        yield from _pipelines(holder.dataset, kind)
    elif isinstance(holder, kind):
        yield holder
        for stage in holder.pipeline:
            yield from _pipelines(stage, kind)
