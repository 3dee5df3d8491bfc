"""What every distributed strategy must get right once.

`ScalableStrategy` is a mixin in front of a Lightning strategy. It owns: agreement between ranks by self-describing
operations with deadlines (`reduce`, `broadcast`, `barrier`, `all_gather`), failures in words on every rank, the user's
order of samples, the exact mean over ranks that hold different numbers of samples, epoch metrics that are equal on all
ranks, and the refusal of features that cannot take effect. A new strategy adds its parallelism and its catalogue entry.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_llmscale import _compat
from lightning_llmscale.collectives.control import ControlPlane
from lightning_llmscale.data.ranks import rank_loader, synchronized_loader
from lightning_llmscale.errors import ConfigurationError, PeerFailureError, RefusedFeatureError
from lightning_llmscale.strategies.metrics import AlignedResults
from lightning_llmscale.strategies.weighting import LossWeighting

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["ScalableStrategy"]

log = logging.getLogger(__name__)

_DOUBLE = struct.Struct("<d")
_SMALL = 4096  # elements; larger tensors are reduced by torch.distributed once all ranks have agreed to do so
_BROKEN_PIPE = re.compile(r"closed by peer|reset by peer|broken pipe|timed out|Connection refused", re.IGNORECASE)
_STUCK_GRACE = 8.0  # seconds that a rank may stay inside a torch collective after a peer has failed


class ScalableStrategy(_Base):
    """Mixin for strategies of this package; place it before a Lightning strategy in the list of bases.

    Args:
        peer_timeout: Seconds of silence after which another rank counts as stopped or unplugged.
        uneven: What to do when a user's own loaders give ranks different numbers of training batches.
        **kwargs: Arguments of the Lightning strategy behind.
    """

    name: str
    """Key of the strategy's catalogue entry."""

    def __init__(self, *, peer_timeout: float, uneven: Literal["drop", "error"], **kwargs: Any) -> None:
        if peer_timeout <= 0:
            raise ConfigurationError(f"peer_timeout={peer_timeout} is no time; give seconds > 0, for example 30")
        if uneven not in ("drop", "error"):
            raise ConfigurationError(f"uneven={uneven!r} is unknown; use 'drop' or 'error'")
        super().__init__(**kwargs)
        self.peer_timeout, self.uneven = peer_timeout, uneven
        self._control: ControlPlane | None = None
        self._weighting: LossWeighting | None = None
        self._trainer: Trainer | None = None
        self._step_share: float | None = None
        self._sync_blocked = False
        self._evaluated: Counter[int] = Counter()
        self._excused = threading.Event()

    # ---- refusals --------------------------------------------------------------------------------------------

    def refuse(self, feature: str) -> None:
        """Raise the catalogue's message for a feature this strategy cannot honour."""
        from lightning_llmscale.strategies.catalog import STRATEGIES

        raise RefusedFeatureError(STRATEGIES[self.name].refuses[feature])

    # ---- set-up and teardown ---------------------------------------------------------------------------------

    @property
    def control(self) -> ControlPlane:
        """The plane on which ranks agree; opened by `setup_environment`."""
        if self._control is None:
            raise ConfigurationError(f"{type(self).__name__} is not set up yet; it is used through a Trainer")
        return self._control

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._control is None or self._control.failure() is not None:
            self._open_control()

    def _open_control(self) -> None:
        global _open_plane
        if _open_plane is not None:
            _open_plane.close()
        address = self.cluster_environment.main_address if self.cluster_environment is not None else "127.0.0.1"
        self._excused.clear()
        self._control = _open_plane = ControlPlane(
            _compat.default_store(),
            rank=self.global_rank,
            world_size=self.world_size,
            address=address,
            peer_timeout=self.peer_timeout,
            on_failure=self._on_peer_failure,
        )

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.control.doing = f"setting up {trainer.state.fn.value if trainer.state.fn else 'the trainer'}"
        data = self.distributed_sampler_kwargs
        self._weighting = LossWeighting(data["num_replicas"], data["rank"], self._total_over_replicas)
        # predictions keep Lightning's sampler, which also tracks the indices that prediction writers need
        self._share_data = _compat.keep_own_samplers(trainer, trainer.state.fn != TrainerFn.PREDICTING) or getattr(
            self, "_share_data", False
        )
        _compat.install_results(trainer, lambda training: AlignedResults(training, self.reduce, self._phantom))
        _compat.align_at_epoch_end(trainer, self._align_metrics)
        _compat.guard_signal_check(trainer, self._guard_signal_check)
        super().setup(trainer)
        self.control.doing = "past set-up"

    def teardown(self) -> None:
        if self._control is not None:
            self._control.doing = "past the end of the run"
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        self._excused.set()
        if self._control is not None and not isinstance(exception, PeerFailureError):
            reason = str(exception).strip().splitlines()
            what = f"{type(exception).__name__}: {reason[0]}" if reason else type(exception).__name__
            self._control.fail(f"rank {self.global_rank} raised {what} (it was {self._control.doing})")
        super().on_exception(exception)

    # ---- agreement between ranks -----------------------------------------------------------------------------

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; a rank that is elsewhere ends the wait with an error that names it."""
        if self._control is not None:
            self._exchange(f"the barrier {name!r}" if name else "a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object that rank `src` gave."""
        if self._control is None or self.world_size == 1:
            return obj
        payload = pickle.dumps(obj) if self.global_rank == src else b""
        answer = self._exchange(f"a broadcast from rank {src}", payload)[src]
        return obj if self.global_rank == src else pickle.loads(answer)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", *, what: str = "a reduction"
    ) -> Any:
        """Reduce a tensor over all ranks, in rank order, so that every rank gets the same bits.

        Within a step, ``mean`` weighs ranks by the number of samples they hold in the batch.

        Args:
            tensor: Any shape; anything but a tensor is returned as it is.
            group: A process group other than the world: left to torch.
            reduce_op: "mean" or "avg", "sum", "min", "max", "product", or a torch ``ReduceOp``.
            what: Name of the value for error messages.
        """
        if self._control is None or not isinstance(tensor, Tensor):
            return tensor
        if group is not None and group is not torch.distributed.group.WORLD:
            return super().reduce(tensor, group, reduce_op)
        op = str(reduce_op).rsplit(".", 1)[-1].lower()
        if op in ("mean", "avg") and self._step_share is not None and self._step_share != 1.0:
            tensor = tensor * self._step_share if self._step_share else torch.zeros_like(tensor)
        if self.world_size == 1:
            return tensor
        if tensor.numel() > _SMALL:
            self._exchange(f"{what} ({op} of {tuple(tensor.shape)} {tensor.dtype})")
            return super().reduce(tensor, None, reduce_op)
        local = tensor.detach().cpu().contiguous()
        answers = self._exchange(f"{what} ({op} of {tuple(local.shape)} {local.dtype})", _to_bytes(local))
        return _combine([_from_bytes(a, local) for a in answers], op).to(tensor.device)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of the same shape from all ranks.

        Raises:
            ConfigurationError: On every rank, if shapes or types differ.
        """
        if self._control is not None and self.world_size > 1 and group is None:
            mine = f"{tuple(tensor.shape)} {tensor.dtype}"
            shapes = [a.decode() for a in self._exchange("an all_gather", mine.encode())]
            if len(set(shapes)) > 1:
                raise ConfigurationError(
                    f"all_gather got different tensors from the ranks: {dict(enumerate(shapes))}; pad them to one shape"
                )
        with self._watched("an all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def _exchange(self, tag: str, payload: bytes = b"") -> list[bytes]:
        try:
            return self.control.exchange(tag, payload)
        except PeerFailureError:
            self._excused.set()
            raise

    def _total_over_replicas(self, value: float) -> float:
        return sum(_DOUBLE.unpack(a)[0] for a in self._exchange("the total of loss weights", _DOUBLE.pack(value)))

    def _align_metrics(self, results: Any) -> None:
        if isinstance(results, AlignedResults) and self.world_size > 1 and self.lightning_module is not None:
            results.align(self._exchange, self.lightning_module)

    # ---- data ------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Give this replica its part of the user's loader (see `data.ranks`)."""
        loader: Any = super().process_dataloader(dataloader)
        data = self.distributed_sampler_kwargs
        replicas = data["num_replicas"]
        if replicas == 1 or getattr(loader, "llmscale_synchronized", False) or not self._share_data:
            return loader
        if self._trainer is None or self._trainer.predicting:
            return loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            if isinstance(loader.sampler, DistributedSampler):
                return loader
            return rank_loader(loader, replicas=replicas, replica=data["rank"], exchange=self._exchange)
        if self._trainer.training:
            return synchronized_loader(
                loader, exchange=self._exchange, uneven=self.uneven, count=_compat.sample_count
            )
        return loader

    def _sizes(self, loaders: list[Any], batch_index: int) -> tuple[int, ...] | None:
        """Samples of each replica in the current batch, or None where all hold the same number."""
        known: list[tuple[int, ...]] = []
        for loader in loaders:
            if hasattr(loader, "rank_weights"):
                known.append(tuple(loader.rank_weights(batch_index)))
                continue
            source = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
            sizes = getattr(source, "sizes", None) or getattr(loader, "sizes", None)
            if sizes:
                known.append(sizes.popleft())
        unequal = {sizes for sizes in known if min(sizes) != max(sizes)}
        if len(unequal) > 1:
            log.warning("several training loaders are uneven in different ways; ranks are weighted equally")
            return None
        return unequal.pop() if unequal else (known[0] if known else None)

    # ---- steps -----------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer, weighting = self._running()
        batch_index = trainer.fit_loop.batch_idx
        sizes = self._sizes(_compat.training_loaders(trainer), batch_index)
        weighting.begin(sizes)
        with self._step(f"in training_step of batch {batch_index}", weighting.share):
            output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        weighting.observe(output, automatic=module is None or module.automatic_optimization)
        return output

    def on_validation_start(self) -> None:
        self._evaluated.clear()
        super().on_validation_start()

    def on_test_start(self) -> None:
        self._evaluated.clear()
        super().on_test_start()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("test_step"):
            return super().test_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trainer, weighting = self._running()
        loss = weighting.scale(closure_loss, trainer.accumulate_grad_batches, boundary=not self._sync_blocked)
        self.control.doing = f"in backward of batch {trainer.fit_loop.batch_idx}"
        with self._named_failures():
            return super().backward(loss, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sync_blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sync_blocked = False

    @property
    def batch_share(self) -> float:
        """Replicas times this one's part of the samples of the latest training batch; 0 if that was a mere filler."""
        return 1.0 if self._weighting is None else self._weighting.share

    def _phantom(self) -> bool:
        """Whether the current batch repeats a sample because nothing was left for this replica."""
        return self._step_share == 0.0

    @contextmanager
    def _evaluation_step(self, step: str) -> Iterator[None]:
        trainer, weighting = self._running()
        index, loader = _compat.current_loader(trainer)
        batch_index = self._evaluated[index]
        self._evaluated[index] += 1
        sizes = None if loader is None else self._sizes([loader], batch_index)
        share = sizes[weighting.replica] * weighting.replicas / sum(sizes) if sizes and sum(sizes) else 1.0
        with self._step(f"in {step}", share):
            yield

    @contextmanager
    def _step(self, doing: str, share: float) -> Iterator[None]:
        """Mark a user's step: what it is, and how much this replica's values count in means."""
        module: LightningModule | None = self.lightning_module
        with ExitStack() as stack:
            self.control.doing, self._step_share = doing, share
            if share == 0.0 and module is not None:
                stack.enter_context(_compat.preserved_metric_states(module))
            stack.enter_context(self._named_failures())
            stack.callback(lambda: setattr(self, "_step_share", None))
            yield
        self.control.doing = f"past {doing}"

    def _running(self) -> tuple[Trainer, LossWeighting]:
        if self._trainer is None or self._weighting is None:
            raise ConfigurationError(f"{type(self).__name__} runs steps only inside a Trainer")
        return self._trainer, self._weighting

    # ---- failures --------------------------------------------------------------------------------------------

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Turn torch's "connection closed by peer" into the name of the peer."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerFailureError):
                self._excused.set()
                raise
            if self._control is not None and _BROKEN_PIPE.search(str(error)):
                sentence = self._control.wait_for_failure(2.0)
                if sentence is not None:
                    self._excused.set()
                    raise PeerFailureError(sentence) from error
            raise

    def _guard_signal_check(self, check: Callable[[], None]) -> None:
        with self._watched("Lightning's signal check before a batch"):
            check()

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Mark a torch collective of the main thread, in which a failed peer would leave it waiting."""
        with nullcontext() if self._control is None else self._control.region(what):
            yield

    def _on_peer_failure(self, sentence: str) -> None:
        """On the control thread: end this process if the main thread is stuck where no error can reach it."""
        self._excused.clear()
        threading.Thread(target=self._end_if_stuck, args=(sentence,), name="llmscale-rescue", daemon=True).start()

    def _end_if_stuck(self, sentence: str) -> None:
        control, deadline = self.control, time.monotonic() + _STUCK_GRACE
        while time.monotonic() < deadline or control.current_region() is None:
            if self._excused.wait(0.2) or control.closed:
                return
        print(f"rank {self.global_rank} ends: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)


_open_plane: ControlPlane | None = None
"""The process's open control plane: one strategy is active at a time, its predecessor says goodbye."""


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).reshape(like.shape)


def _combine(parts: list[Tensor], op: str) -> Tensor:
    """Reduce in rank order. A mean of integers is a float: Lightning's own truncates, which falsifies epoch means."""
    stacked = torch.stack(parts)
    if op in ("mean", "avg"):
        exact = stacked if stacked.is_floating_point() else stacked.double()
        return (exact.sum(0) / len(parts)).to(stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype())
    if op == "sum":
        return stacked.sum(0).to(stacked.dtype)
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    if op == "product":
        return stacked.prod(0).to(stacked.dtype)
    raise ConfigurationError(f"reduce_op={op!r} is unknown; use mean, sum, min, max or product")
