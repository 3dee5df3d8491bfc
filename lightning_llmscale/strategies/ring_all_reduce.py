"""Data parallelism whose gradients travel by our own all-reduce: ring, shared memory, or torch's."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_llmscale import _compat
from lightning_llmscale.collectives.completion import BackwardCompletion
from lightning_llmscale.collectives.ddp_hook import (
    BucketReduction,
    StockReduction,
    reduce_bucket,
    reduce_bucket_stock,
)
from lightning_llmscale.collectives.engine import CommunicationThread
from lightning_llmscale.collectives.reducer import ALGORITHMS, Algorithm, ReducerOptions, open_reducer
from lightning_llmscale.errors import ConfigurationError, PeerFailureError
from lightning_llmscale.strategies.base import ScalableStrategy

__all__ = ["RingAllReduceStrategy"]


class RingAllReduceStrategy(ScalableStrategy, DDPStrategy):
    """Replicate the module on each process and average gradients by a ring or through shared memory.

    Gradients are reduced bucket by bucket while backward still runs, and every rank receives the same bits. The mean is
    exact when ranks hold different numbers of samples. A peer that dies is named on every rank at once.

    Args:
        algorithm: ``"ring"``: reduce-scatter then all-gather over sockets (Patarasuk and Yuan, 2009). ``"direct"``:
            each rank sums a part of everybody's gradients (all-to-all), for lossy wires and high latency.
            ``"two_level"``: shared memory inside a host, direct between hosts. ``"shared_memory"``: all ranks on one
            host. ``"stock"``: torch's all-reduce. ``"auto"``: stock for NCCL, shared memory on one CPU host; between
            hosts the links are measured and the cheapest is taken, which is logged.
        wire: Format in which gradients travel between ranks: as they are (``"fp32"``), or rounded to ``"bf16"`` or to
            ``"int8"`` in blocks. Lossy wires need ``"direct"`` or ``"two_level"``. A NaN or Inf survives each of them.
        error_feedback: Add what the wire dropped to the next step's gradient; by default for ``"int8"`` only.
        ring_order: Order of the ranks in the ring; ``"auto"`` measures the links first. For ``"ring"``.
        segment_bytes: Size of the pieces that travel while others are added. For ``"ring"`` and ``"direct"``.
        deterministic: Sum in rank order whatever the topology. For ``"direct"`` and ``"shared_memory"``.
        bucket_cap_mb: Size of a gradient bucket in MiB; smaller ones overlap earlier, larger ones cost fewer messages.
        peer_timeout: Seconds of silence after which another rank counts as stopped or unplugged.
        find_unused_parameters: Whether parameters may take no part in a step's loss, on some ranks or on all.
            ``"auto"`` allows it unless `static_graph` is set; it costs a note per parameter and one small message.
        static_graph: Promise that every step uses the same parameters in the same way.
        uneven: When a user's own iterable loaders give ranks different numbers of batches: ``"drop"`` ends the epoch
            with the shortest, ``"error"`` stops and names the ranks.
        start_method: How processes start when no launcher such as torchrun did: ``"popen"`` runs the script again,
            ``"spawn"`` and ``"fork"`` suit notebooks and return the weights to the calling process.

    Raises:
        ConfigurationError: If an option is wrong or cannot take effect.
        RefusedFeatureError: For ``Trainer(sync_batchnorm=True)`` on CPU.

    Example:
        >>> trainer = Trainer(strategy=RingAllReduceStrategy(), accelerator="cpu", devices=2)  # doctest: +SKIP
    """

    name = "ring_allreduce"

    def __init__(
        self,
        *,
        algorithm: Literal["auto", "stock", "ring", "direct", "two_level", "shared_memory"] = "auto",
        wire: Literal["fp32", "bf16", "int8"] = "fp32",
        error_feedback: bool | None = None,
        ring_order: list[int] | Literal["auto"] | None = None,
        segment_bytes: int | None = None,
        deterministic: bool = False,
        bucket_cap_mb: float = 25.0,
        peer_timeout: float = 30.0,
        find_unused_parameters: bool | Literal["auto"] = "auto",
        static_graph: bool = False,
        uneven: Literal["drop", "error"] = "drop",
        start_method: Literal["popen", "spawn", "fork"] = "popen",
    ) -> None:
        _check(algorithm, wire, bucket_cap_mb, find_unused_parameters, static_graph, start_method)
        if error_feedback and wire == "fp32":
            raise ConfigurationError(
                "error_feedback=True cannot take effect with wire='fp32', which drops nothing; leave it out"
            )
        super().__init__(
            peer_timeout=peer_timeout,
            uneven=uneven,
            start_method=start_method,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=False,  # torch's own way costs more: see collectives.completion
            gradient_as_bucket_view=True,
        )
        self.algorithm: Algorithm = algorithm
        self.reducer_options = ReducerOptions(
            wire=wire,
            error_feedback=error_feedback,
            ring_order=ring_order,
            segment_bytes=segment_bytes,
            deterministic=deterministic,
        )
        self._may_be_unused = not static_graph if find_unused_parameters == "auto" else find_unused_parameters
        self._reduction: BucketReduction | StockReduction | None = None
        self._thread: CommunicationThread | None = None
        self._completion: BackwardCompletion | None = None
        self._covered: set[int] = set()

    @override
    def _configure_launcher(self) -> None:
        # the first moment at which all options of the Trainer are known, on every rank and before any process starts
        if _compat.layer_sync_requested(self) and self.root_device.type == "cpu":
            self.refuse("sync_batchnorm_cpu")
        super()._configure_launcher()

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # ranks compare their parameters here
        with self._watched("the comparison of the ranks' parameters"), self._named_failures():
            return super()._setup_model(model)

    @override
    def _register_ddp_hooks(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            raise ConfigurationError(f"{type(self).__name__} reduces gradients of a wrapped module only")
        _compat.guard_buffer_broadcast(self.model, self._guard_buffer_broadcast)
        self._close_reduction()
        submit = self._open_stock(self.model) if self.root_device.type == "cuda" else self._open_own(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._covered = {id(p) for p in trainable}
        if self._may_be_unused:
            self._completion = BackwardCompletion(trainable, submit, strict=self.world_size > 1)

    def _open_own(self, model: DistributedDataParallel) -> Callable[[Tensor], Future[Tensor]]:
        hosts = [a.decode() for a in self._exchange("the names of the hosts", socket.gethostname().encode())]
        reducer = open_reducer(
            self.algorithm,
            rank=self.global_rank,
            world_size=self.world_size,
            store=_compat.default_store(),
            hosts=hosts,
            peer_timeout=self.peer_timeout,
            failure=self.control.waiting("the all-reduce of gradients"),
            options=self.reducer_options,
        )
        self._thread = thread = CommunicationThread(reducer)
        self._reduction = BucketReduction(thread, scale=1.0 / self.world_size)
        model.register_comm_hook(self._reduction, reduce_bucket)
        return lambda used: thread.submit(used, 1.0)

    def _open_stock(self, model: DistributedDataParallel) -> Callable[[Tensor], Future[Tensor]]:
        if self.algorithm not in ("auto", "stock") or self.reducer_options != ReducerOptions():
            raise ConfigurationError(
                f"algorithm={self.algorithm!r} with {self.reducer_options} reduces tensors in host memory, and this "
                f"run computes on {self.root_device}; use algorithm='stock' or 'auto' and none of its other options"
            )
        stock = self._reduction = StockReduction(model.process_group, scale=1.0 / self.world_size)
        model.register_comm_hook(stock, reduce_bucket_stock)
        return lambda used: stock.submit(used.to(self.root_device))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._cover_unfrozen_parameters()
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._reduction is not None and self._weighting is not None:
            self._reduction.scale = self._weighting.reduction_scale
        if self._completion is not None:
            self._completion.begin()
        super().pre_backward(closure_loss)

    @override
    def complete_gradients(self) -> None:
        if self._completion is not None and not self._sync_blocked:
            self._completion.complete()
        if self._completion is not None:
            self._completion.end()
        self._raise_reduction_error()

    @override
    def on_validation_start(self) -> None:
        self._take_over_buffers()
        super().on_validation_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        # past DDP, whose forward broadcasts buffers: ranks need not run equally many evaluation batches
        with self._evaluation_step("validation_step"), self.precision_plugin.val_step_context():
            return self.module.validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("test_step"), self.precision_plugin.test_step_context():
            return self.module.test_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._close_reduction()

    @override
    def teardown(self) -> None:
        self._close_reduction()
        super().teardown()

    def _cover_unfrozen_parameters(self) -> None:
        """Wrap the module anew if parameters were unfrozen: DDP reduces only those it found trainable when wrapping."""
        if isinstance(self.model, DistributedDataParallel) and any(
            p.requires_grad and id(p) not in self._covered for p in self.module.parameters()
        ):
            self.model = self._setup_model(self.module)
            self._register_ddp_hooks()

    def _take_over_buffers(self) -> None:
        """Give every rank rank 0's buffers, as DDP does before each training step."""
        if self.world_size == 1 or not isinstance(self.model, DistributedDataParallel):
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad(), self._watched("the broadcast of buffers"):
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                torch.distributed.broadcast(flat, src=0)
                start = 0
                for buffer in buffers:
                    buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
                    start += buffer.numel()

    def _raise_reduction_error(self) -> None:
        error = self._thread.error if self._thread is not None else None
        if error is None:
            return
        # the peer's own words, if they arrive, say more than the broken connection
        sentence = self.control.wait_for_failure(1.0)
        if sentence is not None:
            raise PeerFailureError(sentence) from error
        raise error

    def _close_reduction(self) -> None:
        self._reduction = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._completion is not None:
            self._completion.close()
            self._completion = None


def _check(
    algorithm: str,
    wire: str,
    bucket_cap_mb: float,
    find_unused_parameters: bool | str,
    static_graph: bool,
    start_method: str,
) -> None:
    for option, value, valid in (
        ("algorithm", algorithm, ALGORITHMS),
        ("wire", wire, ("fp32", "bf16", "int8")),
        ("find_unused_parameters", find_unused_parameters, ("auto", True, False)),
        ("start_method", start_method, ("popen", "spawn", "fork")),
    ):
        if value not in valid:
            raise ConfigurationError(f"{option}={value!r} is unknown; use one of {', '.join(map(repr, valid))}")
    if bucket_cap_mb <= 0:
        raise ConfigurationError(f"bucket_cap_mb={bucket_cap_mb} is no size; give MiB > 0, for example 25")
    if static_graph and find_unused_parameters is True:
        raise ConfigurationError(
            "find_unused_parameters=True cannot take effect with static_graph=True, which promises the same graph in "
            "every step; drop one of them"
        )
