"""The only home of private Lightning, torchmetrics and torch names.

Every older third-party strategy died of private names spread over its code. Here each one is listed in `PRIVATE_NAMES`
with the reason for its use, `tests/unit/test_compat.py` fails the day one disappears, and the rest of the package calls
the functions below.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata as ResultMetadata,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection as ResultCollection,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultMetric as ResultMetric,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Sync as ResultSync,
)
from lightning.pytorch.utilities.data import extract_batch_size
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

__all__ = [
    "PRIVATE_NAMES",
    "ResultCollection",
    "ResultMetadata",
    "ResultMetric",
    "ResultSync",
    "align_at_epoch_end",
    "current_loader",
    "default_store",
    "guard_buffer_broadcast",
    "guard_signal_check",
    "inject_sampler",
    "injects_sampler",
    "install_results",
    "layer_sync_requested",
    "logged_steps",
    "preserved_metric_states",
    "sample_count",
    "share_logged_steps",
    "set_logged_steps",
    "training_loaders",
]

_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"

PRIVATE_NAMES: dict[str, str] = {
    f"{_RESULT}:_ResultCollection": "epoch metrics must be aligned over ranks before they are reduced",
    f"{_RESULT}:_ResultMetric": "a metric that one rank never logged is filled in with its neutral element",
    f"{_RESULT}:_Metadata": "describes a metric to ranks that never logged it",
    f"{_RESULT}:_Sync": "the same, for its reduction",
    "trainer:_logger_connector.epoch_end_reached": "the moment after which epoch metrics are computed",
    "trainer:_logger_connector.update_eval_epoch_metrics": "the same, once hooks have logged",
    "trainer:_logger_connector.update_train_epoch_metrics": "the same, once hooks have logged",
    "trainer:_logger_connector.update_train_step_metrics": "the moment at which loggers record a step",
    "trainer:_logger_connector.should_update_logs": "whether they record this one",
    "trainer:fit_loop._should_accumulate": "the same",
    "trainer:_accelerator_connector.use_distributed_sampler": "Lightning's own sampler always shuffles in training",
    "trainer:_results": "the collection of the running loop knows the index of the data loader",
    "trainer:fit_loop._combined_loader": "the loaders of the running fit, flattened",
    "trainer:fit_loop.epoch_loop._results": "replaced by the aligned collection",
    "trainer:fit_loop.epoch_loop.val_loop._results": "replaced by the aligned collection",
    "trainer:validate_loop._results": "replaced by the aligned collection",
    "trainer:test_loop._results": "replaced by the aligned collection",
    "trainer:fit_loop.epoch_loop._broadcast_sigterm_tensor": "a torch collective before each batch; waits are watched",
    "torch.nn.parallel:DistributedDataParallel._sync_buffers": "the same within its forward",
    "trainer:fit_loop.epoch_loop._batches_that_stepped": "the loggers' axis, moved back with the batches on resume",
    "trainer:_evaluation_loop._combined_loader": "the loaders of the running evaluation, flattened",
    "lightning.pytorch.strategies:DDPStrategy._register_ddp_hooks": "Lightning registers hooks on CUDA only",
    "lightning.pytorch.strategies:DDPStrategy._configure_launcher": "the place where Trainer options are complete",
    "lightning.pytorch.strategies:DDPStrategy._setup_model": "wraps the module, for which ranks wait for each other",
    "strategy:_layer_sync": "tells whether sync_batchnorm was asked for",
    "metric:_copy_state_dict": "a repeated sample must not count in a metric's state",
    "metric:_update_count": "the same",
    "metric:_computed": "the same",
    "torch.distributed.distributed_c10d:_get_default_store": "rendezvous of our own connections",
}
"""Where each private name is found (`module:path`, or a path on a Trainer, strategy or metric) and why it is needed."""


def default_store() -> Store:
    """The key-value store by which the default process group met."""
    return torch.distributed.distributed_c10d._get_default_store()


def layer_sync_requested(strategy: DDPStrategy) -> bool:
    """Whether ``Trainer(sync_batchnorm=True)`` was given."""
    return strategy._layer_sync is not None


def injects_sampler(trainer: Trainer) -> bool:
    """Whether Lightning is to inject a distributed sampler (``Trainer(use_distributed_sampler=...)``)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def inject_sampler(trainer: Trainer, inject: bool) -> None:
    """Switch Lightning's sampler injection on or off."""
    trainer._accelerator_connector.use_distributed_sampler = inject


def training_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders of the running fit, flattened."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def current_loader(trainer: Trainer) -> tuple[int, Any | None]:
    """Index and loader of the running evaluation that the current batch came from."""
    loop = trainer._evaluation_loop
    index = (trainer._results.dataloader_idx if trainer._results is not None else None) or 0
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    return index, loaders[index] if index < len(loaders) else None


def install_results(trainer: Trainer, make: Callable[[bool], ResultCollection]) -> None:
    """Give every loop that logs a result collection made by `make(training)`."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = make(loop is epoch_loop)


def align_at_epoch_end(trainer: Trainer, align: Callable[[ResultCollection], None]) -> None:
    """Call `align` with the running loop's results at each moment after which Lightning computes epoch metrics."""
    connector = trainer._logger_connector

    def around(original: Callable[[], Any], before: bool) -> Callable[[], Any]:
        def call() -> Any:
            if before and trainer._results is not None:
                align(trainer._results)
            value = original()
            if not before and trainer._results is not None:
                align(trainer._results)
            return value

        return call

    for name, before in (
        ("epoch_end_reached", False),
        ("update_eval_epoch_metrics", True),
        ("update_train_epoch_metrics", True),
    ):
        setattr(connector, name, around(getattr(type(connector), name).__get__(connector), before))


def share_logged_steps(trainer: Trainer, share: Callable[[ResultCollection], None]) -> None:
    """Call `share` with the training results before loggers record the values of a step."""
    connector = trainer._logger_connector
    original = type(connector).update_train_step_metrics.__get__(connector)

    def call() -> None:
        accumulating = trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization
        if trainer._results is not None and not accumulating and connector.should_update_logs:
            share(trainer._results)
        original()

    setattr(connector, "update_train_step_metrics", call)  # noqa: B010 - mypy forbids assigning to a method


def guard_signal_check(trainer: Trainer, guard: Callable[[Callable[[], None]], None]) -> None:
    """Run Lightning's collective before each training batch inside `guard`, so that waits in it are seen."""
    loop = trainer.fit_loop.epoch_loop
    original = type(loop)._broadcast_sigterm_tensor.__get__(loop)
    loop._broadcast_sigterm_tensor = lambda: guard(original)  # type: ignore[method-assign]


def guard_buffer_broadcast(model: DistributedDataParallel, guard: Callable[[Callable[[], None]], None]) -> None:
    """Run DDP's broadcast of buffers in its forward inside `guard`, so that waits in it are seen."""
    whole = weakref.ref(model)  # a cycle would keep the hooks of a wrapper alive that was replaced

    def broadcast() -> None:
        if (wrapper := whole()) is not None:
            type(wrapper)._sync_buffers(wrapper)  # type: ignore[no-untyped-call]

    model._sync_buffers = lambda: guard(broadcast)  # type: ignore[method-assign]


def logged_steps(trainer: Trainer) -> int:
    """Optimizer steps as the loggers' axis counts them."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Set the loggers' axis; a resume in mid-window would be counted as a step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def sample_count(batch: Any) -> int:
    """Number of samples in a collated batch, as `self.log` counts them; 1 where it cannot be told."""
    try:
        return int(extract_batch_size(batch))
    except Exception:  # noqa: BLE001 - Lightning raises several kinds for batches without tensors
        return 1


@contextmanager
def preserved_metric_states(module: LightningModule) -> Iterator[None]:
    """Restore the state of every torchmetrics object of `module` on exit."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    saved = [(m._copy_state_dict(), m._update_count, m._computed) for m in metrics]
    try:
        yield
    finally:
        for metric, (states, updates, computed) in zip(metrics, saved, strict=True):
            for name, state in states.items():
                setattr(metric, name, state)
            metric._update_count, metric._computed = updates, computed
