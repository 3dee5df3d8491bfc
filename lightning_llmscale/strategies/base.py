"""What every distributed strategy must get right once.

`ScalableStrategy` is a mixin in front of a Lightning strategy. It owns the user's order of samples, the exact mean over
ranks that hold different numbers of samples, epoch metrics that are equal on all ranks, and the refusal of features
that cannot take effect; `agreement.AgreeingStrategy` below it owns collectives and failures. A new strategy adds its
parallelism and its catalogue entry.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_llmscale import _compat
from lightning_llmscale.data.ranks import rank_loader, synchronized_loader
from lightning_llmscale.data.webdataset_pipelines import share_webdataset
from lightning_llmscale.errors import ConfigurationError, PeerFailureError, RefusedFeatureError
from lightning_llmscale.strategies.agreement import AgreeingStrategy
from lightning_llmscale.strategies.catalog import STRATEGIES
from lightning_llmscale.strategies.metrics import AlignedResults
from lightning_llmscale.strategies.weighting import LossWeighting

__all__ = ["ScalableStrategy"]

log = logging.getLogger(__name__)

_DOUBLE = struct.Struct("<d")


class ScalableStrategy(AgreeingStrategy):
    """Mixin for strategies of this package; place it before a Lightning strategy in the list of bases.

    Args:
        peer_timeout: Seconds of silence after which another rank counts as stopped or unplugged.
        uneven: What to do when a user's own loaders give ranks different numbers of training batches.
        **kwargs: Arguments of the Lightning strategy behind.
    """

    name: str
    """Key of the strategy's catalogue entry."""

    def __init__(self, *, peer_timeout: float, uneven: Literal["drop", "error"], **kwargs: Any) -> None:
        if uneven not in ("drop", "error"):
            raise ConfigurationError(f"uneven={uneven!r} is unknown; use 'drop' or 'error'")
        super().__init__(peer_timeout=peer_timeout, **kwargs)
        self.uneven = uneven
        self._weighting: LossWeighting | None = None
        self._trainer: Trainer | None = None
        self._sync_blocked = False
        self._injects_sampler: bool | None = None
        self._pass: int | None = None
        self._pass_start = 0
        self._in_pass = 0
        self._evaluated: Counter[int] = Counter()

    # ---- refusals --------------------------------------------------------------------------------------------

    def refuse(self, feature: str) -> NoReturn:
        """Raise the catalogue's message for a feature this strategy cannot honour."""
        raise RefusedFeatureError(STRATEGIES[self.name].refuses[feature])

    # ---- set-up and teardown ---------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.control.doing = f"setting up {trainer.state.fn.value if trainer.state.fn else 'the trainer'}"
        data = self.distributed_sampler_kwargs
        self._weighting = LossWeighting(data["num_replicas"], data["rank"], self._total_over_replicas)
        if self._injects_sampler is None:
            self._injects_sampler = _compat.injects_sampler(trainer)
        # predictions keep Lightning's sampler, which also tracks the indices that prediction writers need
        predicting = trainer.state.fn == TrainerFn.PREDICTING
        _compat.inject_sampler(trainer, self._injects_sampler and predicting)
        _compat.install_results(
            trainer, lambda training: AlignedResults(training, self.reduce, lambda: self._step_share)
        )
        _compat.align_at_epoch_end(trainer, self._align_metrics)
        _compat.share_logged_steps(trainer, self._share_step_metrics)
        _compat.guard_signal_check(trainer, self._guard_signal_check)
        super().setup(trainer)
        self.control.doing = "past set-up"

    @override
    def teardown(self) -> None:
        if self._control is not None:
            self._control.doing = "past the end of the run"
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._excused = True
        if isinstance(exception, PeerFailureError):
            # mostly everybody's news; but a data plane that lost patience knows something of its own
            if self._control is not None:
                self._control.fail(str(exception))
        elif self._control is not None:
            reason = str(exception).strip().splitlines()
            # a data worker's own words stand at the end of what its parent raises
            said = " ... ".join(dict.fromkeys((reason[0], reason[-1]))) if reason else ""
            what = f"{type(exception).__name__}: {said}" if said else type(exception).__name__
            self._control.fail(f"rank {self.global_rank} raised {what} (it was {self._control.doing})")
        super().on_exception(exception)

    def _total_over_replicas(self, value: float) -> float:
        return sum(_DOUBLE.unpack(a)[0] for a in self._exchange("the total of loss weights", _DOUBLE.pack(value)))

    def _align_metrics(self, results: Any) -> None:
        if isinstance(results, AlignedResults) and self.world_size > 1 and self.lightning_module is not None:
            results.align(self._exchange, self.lightning_module)

    def _share_step_metrics(self, results: Any) -> None:
        if isinstance(results, AlignedResults) and self.world_size > 1 and self._weighting is not None:
            results.share_step(self._exchange, self._weighting.share)

    # ---- data ------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Give this replica its part of the user's loader (see `data.ranks`)."""
        loader: Any = super().process_dataloader(dataloader)
        data = self.distributed_sampler_kwargs
        replicas = data["num_replicas"]
        if replicas == 1 or getattr(loader, "llmscale_synchronized", False):
            return loader
        if self._trainer is None or self._trainer.predicting:
            return loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            if isinstance(loader.sampler, DistributedSampler):
                return loader
            if self._injects_sampler:
                return rank_loader(loader, replicas=replicas, replica=data["rank"], exchange=self._exchange)
        if self._injects_sampler:
            share_webdataset(loader, replicas=replicas, replica=data["rank"])
        if self._trainer.training:
            return synchronized_loader(loader, exchange=self._exchange, uneven=self.uneven, count=_compat.sample_count)
        return loader

    def _sizes(self, loaders: list[Any], batch_index: int, in_pass: int) -> tuple[int, ...] | None:
        """Samples of each replica in the current batch, or None where all hold the same number.

        Args:
            loaders: Where the batch came from.
            batch_index: Index in the epoch, which a resumed run goes on counting.
            in_pass: Index in this pass over the loaders, which start anew in a resumed run.
        """
        known: set[tuple[int, ...]] = set()
        for loader in loaders:
            if hasattr(loader, "rank_weights"):
                known.add(tuple(loader.rank_weights(batch_index)))
                continue
            for holder in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
                ask = getattr(holder, "llmscale_sizes", None)
                if ask is not None and (sizes := ask(in_pass)) is not None:
                    known.add(sizes)
                    break
        unequal = {sizes for sizes in known if min(sizes) != max(sizes)}
        if len(unequal) > 1:
            log.warning("several training loaders are uneven in different ways; ranks are weighted equally")
            return None
        return unequal.pop() if unequal else None

    # ---- steps -----------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer, weighting = self._running()
        batch_index = trainer.fit_loop.batch_idx
        weighting.begin(self._sizes(_compat.training_loaders(trainer), batch_index, self._in_pass))
        with self._step(f"in training_step of batch {batch_index}", weighting.share):
            output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        weighting.observe(output, automatic=module is None or module.automatic_optimization)
        return output

    @override
    def on_train_start(self) -> None:
        self._pass = None
        super().on_train_start()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer, _ = self._running()
        index = trainer.fit_loop.batch_idx  # counts batches that were skipped, because they are None, too
        if self._pass != trainer.current_epoch:
            # only the first pass of a run may begin in the middle of an epoch, by a resume
            self._pass_start = index if self._pass is None else 0
            self._pass = trainer.current_epoch
        self._in_pass = index - self._pass_start
        super().on_train_batch_start(batch, batch_idx)

    @override
    def on_validation_start(self) -> None:
        self._evaluated.clear()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._evaluated.clear()
        super().on_test_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("validation_step"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("test_step"):
            return super().test_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        trainer, weighting = self._running()
        module = self.module
        loss = weighting.scale(closure_loss, trainer.accumulate_grad_batches, boundary=not self._sync_blocked)
        self.control.doing = f"in backward of batch {trainer.fit_loop.batch_idx}"
        # nobody waits for anybody in a backward that reduces nothing: a long one must not look like a deadlock
        waits = nullcontext() if self._sync_blocked else self._watched("backward")
        with waits, self._named_failures():
            self.pre_backward(loss)
            loss = self.precision_plugin.pre_backward(loss, module)
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            self.complete_gradients()
            loss = self.precision_plugin.post_backward(loss, module)
            self.post_backward(loss)
        self.control.doing = f"past backward of batch {trainer.fit_loop.batch_idx}"
        return loss

    def complete_gradients(self) -> None:
        """Hook for strategies: gradients must be final when this returns, before any callback sees them."""

    @property
    def module(self) -> LightningModule:
        """The user's module; only inside a Trainer."""
        if self.lightning_module is None:
            raise ConfigurationError(f"{type(self).__name__} runs steps only inside a Trainer")
        return self.lightning_module

    @override
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

    @contextmanager
    def _evaluation_step(self, step: str) -> Iterator[None]:
        trainer, weighting = self._running()
        index, loader = _compat.current_loader(trainer)
        batch_index = self._evaluated[index]
        self._evaluated[index] += 1
        sizes = None if loader is None else self._sizes([loader], batch_index, batch_index)
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
