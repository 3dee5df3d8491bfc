"""A user's own webdataset pipeline on several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

from lightning_llmscale.data.webdataset_pipelines import share_webdataset
from lightning_llmscale.errors import ConfigurationError


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    with wds.ShardWriter(str(tmp_path / "%04d.tar"), maxcount=3, verbose=0) as writer:
        for i in range(20):
            writer.write({"__key__": f"{i:03d}", "cls": i})
    return sorted(map(str, tmp_path.glob("*.tar")))


def pipeline(shards: list[str], **options: Any) -> Any:
    return wds.WebDataset(shards, shardshuffle=False, empty_check=False, **options).decode().to_tuple("cls")


def numbers(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch[0]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [wds.WebLoader, DataLoader])
def test_a_plain_pipeline_is_split_over_the_replicas(shards: list[str], make: Any, workers: int) -> None:
    seen = []
    for replica in range(3):
        loader = make(pipeline(shards), batch_size=2, num_workers=workers)
        share_webdataset(loader, replicas=3, replica=replica)
        share_webdataset(loader, replicas=3, replica=replica)  # looking again changes nothing
        seen += numbers(loader)
    assert sorted(seen) == list(range(20))


def test_a_pipeline_that_gives_everybody_everything_is_refused(shards: list[str]) -> None:
    loader = wds.WebLoader(pipeline(shards, nodesplitter=None), batch_size=2)
    with pytest.raises(ConfigurationError, match=r"nodesplitter=wds\.split_by_node"):
        share_webdataset(loader, replicas=2, replica=0)


def test_a_pipeline_that_splits_by_itself_is_left_alone(shards: list[str]) -> None:
    made = pipeline(shards, nodesplitter=wds.split_by_node)
    before = list(made.pipeline)
    share_webdataset(DataLoader(made, batch_size=2), replicas=2, replica=0)
    assert made.pipeline == before


def test_other_loaders_are_not_looked_into() -> None:
    share_webdataset(DataLoader([1, 2, 3]), replicas=2, replica=0)
    share_webdataset([1, 2, 3], replicas=2, replica=0)
