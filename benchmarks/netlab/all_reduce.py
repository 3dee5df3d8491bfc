"""All-reduce over slow links: this package's algorithms and wires against gloo, in the network laboratory (needs root).

    python benchmarks/netlab/all_reduce.py [--quick] [--rounds 9]

The cases are 2 and 16 MB of fp32; speeds are medians relative to gloo in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import rounds
import torch
import torch.distributed as dist

from lightning_llmscale.collectives.reducer import Algorithm, Reducer, ReducerOptions

FLAT: dict[str, tuple[Algorithm, ReducerOptions]] = {
    "ring": ("ring", ReducerOptions()),
    "direct": ("direct", ReducerOptions()),
    "direct bf16": ("direct", ReducerOptions(wire="bf16")),
    "direct int8": ("direct", ReducerOptions(wire="int8")),
}
ISLANDS: dict[str, tuple[Algorithm, ReducerOptions]] = {
    "ring, good order": ("ring", ReducerOptions()),
    "ring, bad order": ("ring", ReducerOptions(ring_order=[0, 2, 1, 3])),
    "ring, measured order": ("ring", ReducerOptions(ring_order="auto")),
    "two-level": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]])),
    "two-level bf16": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]], wire="bf16")),
    "two-level int8": ("two_level", ReducerOptions(islands=[[0, 1], [2, 3]], wire="int8")),
    "auto": ("auto", ReducerOptions()),
}
LABS: dict[str, dict[str, Any]] = {
    "2 hosts at 100 Mbit/s": {"hosts": 2, "rate": "100mbit"},
    "4 hosts at 100 Mbit/s": {"hosts": 4, "rate": "100mbit"},
    "2 hosts at 1 Gbit/s": {"hosts": 2, "rate": "1gbit"},
    "2 islands of 2 hosts, 1 Gbit/s inside, 100 Mbit/s between": {"hosts": 4, "rate": "1gbit", "islands": 2},
}


def measure(place: str, quick: bool, count: int) -> rounds.Seconds:
    open_here = rounds.connect()
    chosen = ISLANDS if "islands" in place else FLAT
    reducers = {name: open_here(algorithm, options) for name, (algorithm, options) in chosen.items()}
    seconds: rounds.Seconds = {}
    for megabytes in (2,) if quick else (2, 16):
        flat = torch.ones(megabytes << 18)
        variants: dict[str, Callable[[], None]] = {"gloo": partial(by_gloo, flat)}
        variants |= {name: partial(by_reducer, reducer, flat) for name, reducer in reducers.items()}
        seconds[f"{megabytes} MB"] = rounds.interleave(variants, count)
    for reducer in reducers.values():
        reducer.close()
    return seconds


def by_gloo(flat: torch.Tensor) -> None:
    dist.all_reduce(flat)
    flat.mul_(1 / dist.get_world_size())


def by_reducer(reducer: Reducer, flat: torch.Tensor) -> None:
    reducer.all_reduce(flat, 1 / dist.get_world_size(), "gradient")


if __name__ == "__main__":
    rounds.main(__doc__, "network_all_reduce.json", LABS, measure)
