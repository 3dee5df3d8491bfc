"""A DDP training step over slow links: gradients through this package's hook against DDP's own all-reduce (needs root).

    python benchmarks/netlab/training_step.py [--quick] [--rounds 9]

Every host trains one MLP per variant, a step of each in turn; speeds are medians relative to stock DDP in the same run.
"no communication" is the floor: the step of one host alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import rounds
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_llmscale.collectives.ddp_hook import BucketReduction, reduce_bucket
from lightning_llmscale.collectives.engine import CommunicationThread
from lightning_llmscale.collectives.reducer import Algorithm, ReducerOptions

VARIANTS: dict[str, tuple[Algorithm, ReducerOptions]] = {
    "ring": ("ring", ReducerOptions()),
    "direct bf16": ("direct", ReducerOptions(wire="bf16")),
    "direct int8": ("direct", ReducerOptions(wire="int8")),
}
LABS: dict[str, dict[str, Any]] = {
    "2 hosts at 100 Mbit/s": {"hosts": 2, "rate": "100mbit"},
    "4 hosts at 100 Mbit/s": {"hosts": 4, "rate": "100mbit"},
    "2 hosts at 1 Gbit/s": {"hosts": 2, "rate": "1gbit"},
}
SHAPES = {"1.1 M": (512, 4, 32), "25 M": (2048, 6, 16)}
"""Width, layers and batch per host, by number of parameters."""


def measure(place: str, quick: bool, count: int) -> rounds.Seconds:
    open_here = rounds.connect()
    case = "25 M" if "Gbit" in place and not quick else "1.1 M"
    width, layers, batch = SHAPES[case]
    torch.manual_seed(0)
    plain = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    state = plain.state_dict()
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    variants: dict[str, Callable[[], None]] = {"ddp": partial(step, *wrapped(width, layers, state), inputs)}
    threads = []
    for name, (algorithm, options) in VARIANTS.items():
        model, optimizer = wrapped(width, layers, state)
        threads.append(CommunicationThread(open_here(algorithm, options)))
        model.register_comm_hook(BucketReduction(threads[-1], 1 / dist.get_world_size()), reduce_bucket)
        variants[name] = partial(step, model, optimizer, inputs)
    variants["no communication"] = partial(step, plain, torch.optim.SGD(plain.parameters(), lr=1e-3), inputs)
    seconds = rounds.interleave(variants, count)
    for thread in threads:
        if thread.error is not None:
            raise thread.error
        thread.close()
    return {case: seconds}


def wrapped(
    width: int, layers: int, state: dict[str, torch.Tensor]
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    model.load_state_dict(state)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return ddp, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    rounds.main(__doc__, "network_training_step.json", LABS, measure)
