"""The public door: WebDataset tar shards as a LightningDataModule."""

from __future__ import annotations

__all__ = ["WebDatasetDataModule"]

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule

from lightning_llmscale.data.cache import parse_bytes
from lightning_llmscale.data.checks import at_least, one_of, without_effect
from lightning_llmscale.data.collate import collate_samples, collate_sequences
from lightning_llmscale.data.loader import Cursor, EvaluationLoader, Layout, TrainLoader
from lightning_llmscale.data.mixing import MixedPlan, Stage, Stop, shares
from lightning_llmscale.data.opening import Packing, SourceOptions
from lightning_llmscale.data.order import auto_lanes
from lightning_llmscale.data.plan import EpochEnd, ShuffledPlan, StoredPlan
from lightning_llmscale.data.processing import OnBad, PipelineStage, Processing
from lightning_llmscale.data.progress import AlignProgress, compare_fingerprints, digest, snapshot
from lightning_llmscale.data.sources import Source
from lightning_llmscale.data.tokens import make_token_reader
from lightning_llmscale.errors import ConfigurationError, DataError

_STATE_VERSION = 1


class WebDatasetDataModule(LightningDataModule):
    """Stream WebDataset shards in an order that depends on the seed alone, and resume it to the exact sample.

    The same global batches are formed for any number of ranks and workers; every rank gets the same number of
    batches. A checkpoint resumes exactly on another number of ranks or workers, in the middle of an epoch or of an
    accumulation window, and with another ``global_batch_size``.

    With ``seq_len``, the documents of the samples become sequences for a language model. A batch is
    ``{"input_ids": (B, T), "labels": (B, T)}``, int64, where ``labels`` are the inputs shifted by one:
    ``cross_entropy(logits, labels)`` without another shift; labels of -100 predict nothing. By default bytes are the
    tokens 0 to 255, each document ends with token 256, and documents are joined and cut.

    Without ``seq_len``, items are WebDataset's dicts (``__key__``, ``__url__``, one entry for each extension),
    decoded by extension and stacked.

    Validation and test read every item once, in stored order, on any number of ranks. When ranks or batches do not
    divide, the last batches differ by a few items; see ``docs/data.md``.

    Args:
        train: Shards to train on: a brace pattern (``"shards/train-{000000..000015}.tar"``), a glob, a folder, or a
            list; or a mapping of names to such, to mix datasets by ``weights``.
        val: Shards to validate on.
        test: Shards to test on.
        weights: Share of each dataset when ``train`` is a mapping of names to shards. They may be changed on resume:
            a new stage then begins at the position reached.
        mix_stop: End of a pass over a mixture: ``"first"`` or ``"all"`` of the datasets were read whole, or a number of
            items. Each dataset goes on where the last pass left it.
        global_batch_size: Items in one batch over all ranks (before gradient accumulation).
        seq_len: Tokens in a sequence; ``None`` for whole samples.
        seed: Seed of the training order.
        num_workers: DataLoader workers of each rank.
        epoch_end: What becomes of items that do not fill a global batch: ``"drop"`` leaves them out of this epoch,
            ``"pad"`` ends the epoch with a smaller batch (and the last, shorter sequence), ``"continuous"`` lets the
            next epoch fill the batch, so that each item comes once before any comes again.
        packing: How documents become sequences: ``"concat"`` joins and cuts them, ``"best_fit"`` lays whole documents
            side by side, ``"none"`` pads each; documents longer than a sequence are split, never cut off.
        tokenizer: ``"bytes"``; ``"uint16"`` or ``"uint32"`` for documents that hold token ids; the path of a Hugging
            Face ``tokenizer.json``; or ``"tiktoken:<encoding>"``.
        text_key: Extension of the member that holds the document.
        document_ids: Add ``document_ids`` and ``position_ids`` to the batches, (B, T), for attention inside documents.
        members: Extensions of the samples to read and decode, the others are left out; all when ``None``.
        filter: Keeps the decoded samples for which it returns true. A rejected sample of the training data is
            replaced by another of its shard, so that batches keep their size; validation and test leave it out.
        transform: Applied to each decoded sample.
        pipeline: webdataset filters (``wds.decode("torchrgb")``, ``wds.to_tuple("jpg", "cls")``, ``wds.map(f)``,
            ``wds.select(f)``, ``wds.rename(...)``) over the stream of undecoded samples, instead of decoding,
            ``filter`` and ``transform``; each stage gives one sample for one, or none.
        collate: Makes a batch of a list of samples; torch's ``default_collate`` when ``None``.
        trusted: Unpickle ``pyd`` and ``pickle`` members, which can run any code.
        on_bad: ``"skip"`` replaces samples that cannot be decoded, as ``filter`` does, and reads damaged shards as
            far as they go; all are counted and named at the end of the epoch.
        max_bad: Bad samples that a rank may skip in an epoch.
        lanes: Streams that a batch is dealt from; more mix better and keep more shards open. ``"auto"`` follows the
            batch size and mixes about as well as a full shuffle (see ``docs/data.md``).
        window: Shards open in each lane.
        cache_dir: Folder for shards that are remote (any fsspec URL) or compressed, shared by the processes of a node;
            ``~/.cache/lightning_llmscale`` when ``None``.
        cache_limit: Bytes that the cache may hold.
        storage_options: Options of fsspec for remote shards, such as credentials.
        prefetch_factor: Batches each worker holds ready.
        pin_memory: Copy batches to page-locked memory, for transfer to a GPU.

    Raises:
        DataError: A shard is missing, empty, truncated or no tar (at ``setup``), or the data changed since the
        checkpoint. ConfigurationError: Options that contradict each other or the number of ranks.
    """

    def __init__(
        self,
        *,
        train: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        val: str | Sequence[str] | None = None,
        test: str | Sequence[str] | None = None,
        global_batch_size: int,
        seq_len: int | None = None,
        weights: Mapping[str, float] | None = None,
        mix_stop: Stop = "first",
        seed: int = 0,
        num_workers: int = 0,
        epoch_end: EpochEnd = "drop",
        packing: Packing = "concat",
        tokenizer: str = "bytes",
        text_key: str = "txt",
        document_ids: bool = False,
        members: Sequence[str] | None = None,
        filter: Callable[[dict[str, Any]], bool] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        pipeline: Sequence[PipelineStage] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        trusted: bool = False,
        on_bad: OnBad = "raise",
        max_bad: int = 100,
        lanes: int | str = "auto",
        window: int = 4,
        cache_dir: str | None = None,
        cache_limit: str = "200GB",
        storage_options: dict[str, Any] | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        at_least(
            1, global_batch_size=global_batch_size, seq_len=seq_len, window=window, prefetch_factor=prefetch_factor
        )
        at_least(0, num_workers=num_workers, seed=seed, max_bad=max_bad)
        one_of(OnBad, on_bad=on_bad)
        one_of(EpochEnd, epoch_end=epoch_end)
        one_of(Packing, packing=packing)
        if lanes != "auto":
            if not isinstance(lanes, int):
                raise ConfigurationError(f"lanes={lanes!r} is not possible; use 'auto' or a number.")
            at_least(1, lanes=lanes)
        if seq_len is None:
            without_effect(
                "on whole samples; give seq_len too, or leave it out",
                packing=packing != "concat",
                tokenizer=tokenizer != "bytes",
                document_ids=document_ids,
            )
        else:
            without_effect(
                "with seq_len, where documents are read as tokens; filter and transform them when packing",
                members=members,
                filter=filter,
                transform=transform,
                pipeline=pipeline,
                trusted=trusted,
            )
        self.train, self.val, self.test = train, val, test
        self.global_batch_size = global_batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.num_workers = num_workers
        self.epoch_end: EpochEnd = epoch_end
        parse_bytes("cache_limit", cache_limit)
        self._options = SourceOptions(
            seed=seed,
            seq_len=seq_len,
            tokens=make_token_reader(tokenizer, text_key) if seq_len is not None else None,
            packing=packing,
            text_key=text_key,
            document_ids=document_ids,
            processing=Processing(
                members=members, trusted=trusted, filter=filter, transform=transform, pipeline=pipeline, on_bad=on_bad
            ),
            cache_dir=cache_dir,
            cache_limit=cache_limit,
            storage_options=storage_options,
        )
        self._max_bad = max_bad
        self._collate = collate or (collate_samples if seq_len is None else collate_sequences)
        self._lanes = lanes if isinstance(lanes, int) else auto_lanes(global_batch_size)
        self._lanes_chosen = isinstance(lanes, int)
        self._window = window
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._stage = self._first_stage(weights)
        self._mix_stop: Stop = mix_stop
        self._train_sources: dict[str, Source] = {}
        self._sources: dict[str, Source] = {}
        self._cursor = Cursor()
        self._loader: TrainLoader | None = None
        self._align = AlignProgress(self._cursor)

    def _first_stage(self, weights: Mapping[str, float] | None) -> Stage | None:
        if not isinstance(self.train, Mapping):
            without_effect("on one dataset; give train as a mapping of names to shards", weights=weights)
            return None
        if weights is None or set(weights) != set(self.train):
            raise ConfigurationError(
                f"weights={weights!r} must give a weight for each dataset: {', '.join(self.train)}."
            )
        if self.epoch_end != "continuous":
            raise ConfigurationError(
                f"epoch_end={self.epoch_end!r} is not possible for a mixture, whose datasets end at different times; "
                f"use epoch_end='continuous'."
            )
        shares(weights)
        return Stage({name: float(weights[name]) for name in self.train})

    @property
    def vocab_size(self) -> int:
        """Number of token ids with ``seq_len``, the separator of documents included; 0 for stored tokens."""
        tokens = self._options.tokens
        return tokens.vocab_size if tokens is not None else 0

    def setup(self, stage: str) -> None:
        """Find the shards, read or make their indexes, and check them against the options and the number of ranks.

        Args:
            stage: ``"fit"``, ``"validate"`` or ``"test"``.
        """
        layout = self._layout()
        self.check_replicas(layout.world_size)
        in_use = 2 * self._lanes * self._window // layout.world_size + 8
        for name in {"fit": ("val",), "validate": ("val",), "test": ("test",)}.get(stage, ()):
            shards = {"val": self.val, "test": self.test}[name]
            if shards is not None and name not in self._sources:
                self._sources[name] = self._options.open(name, shards, in_use)
        if stage == "fit":
            for name, shards in self._train_patterns().items():
                if name not in self._train_sources:
                    self._train_sources[name] = self._options.open(name, shards, in_use)
            self._setup_fit(layout)

    def check_replicas(self, replicas: int) -> None:
        """Check the options against the number of data replicas, which a launcher knows before it starts any.

        Args:
            replicas: Number of data replicas.

        Raises:
            ConfigurationError: If a global batch has no item for each of them.
        """
        if self.global_batch_size < replicas:
            raise ConfigurationError(
                f"global_batch_size={self.global_batch_size} is smaller than the number of ranks, {replicas}; "
                f"use at least one item a rank."
            )

    def _train_patterns(self) -> Mapping[str, str | Sequence[str]]:
        if self.train is None:
            raise ConfigurationError("The DataModule has no train data; give it train='shards/train-{000..015}.tar'.")
        return self.train if isinstance(self.train, Mapping) else {"train": self.train}

    def _setup_fit(self, layout: Layout) -> None:
        items = self._train_plan().items
        if items < self.global_batch_size:
            raise DataError(
                f"train holds {items} {self._options.unit}, fewer than global_batch_size={self.global_batch_size}; use "
                f"a batch of at most {items}, or more data."
            )
        if self.trainer is None:
            return
        self._check_equal_parts(layout)
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if self._align not in callbacks:
            callbacks.insert(0, self._align)

    def _check_equal_parts(self, layout: Layout) -> None:
        """Refuse batches that do not divide by the ranks where nothing would weight them."""
        ranks, batch = layout.world_size, self.global_batch_size
        # strategies of this package tell each batch's share; others average ranks alike
        if ranks == 1 or self.trainer is None or hasattr(self.trainer.strategy, "batch_share"):
            return
        other = f"or a strategy of lightning_llmscale: {type(self.trainer.strategy).__name__} weights all ranks alike."
        if batch % ranks:
            fit = batch - batch % ranks
            raise ConfigurationError(
                f"global_batch_size={batch} does not divide by {ranks} ranks; use {fit} or {fit + ranks}, {other}"
            )
        if self.epoch_end == "pad":
            raise ConfigurationError(
                f"epoch_end='pad' gives ranks unequal parts of the last batch; use 'drop' or 'continuous', {other}"
            )

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise ConfigurationError(
                f"The DataModule has no {name} data; give it {name}='shards/{name}-{{000..015}}.tar'."
            )
        return self._sources[name]

    def _layout(self) -> Layout:
        strategy = self.trainer.strategy if self.trainer is not None else None
        replica = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return Layout(
            global_batch_size=self.global_batch_size,
            rank=replica["rank"],
            world_size=replica["num_replicas"],
            num_workers=self.num_workers,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
            max_bad=self._max_bad,
        )

    def _train_plan(self) -> ShuffledPlan | MixedPlan:
        plans = {
            name: ShuffledPlan(source, self._lanes, self._window, remainder=self.epoch_end == "pad")
            for name, source in self._train_sources.items()
        }
        return plans["train"] if self._stage is None else MixedPlan(plans, self._stage, self.seed, self._mix_stop)

    def train_dataloader(self) -> TrainLoader:
        """Loader of the shuffled training data, from the position of the last loaded checkpoint on."""
        plan = self._train_plan()
        self._loader = TrainLoader(plan, self._layout(), self._collate, self.epoch_end, self._cursor)
        return self._loader

    def val_dataloader(self) -> EvaluationLoader | list[Any]:
        """Loader of the validation data in stored order; empty when there is none."""
        return self._evaluation("val") if self.val is not None else []

    def test_dataloader(self) -> EvaluationLoader:
        """Loader of the test data in stored order."""
        return self._evaluation("test")

    def _evaluation(self, name: str) -> EvaluationLoader:
        source, layout = self._source(name), self._layout()
        if source.items < layout.world_size:
            raise DataError(
                f"{name} holds {source.items} {self._options.unit}, fewer than the {layout.world_size} ranks; use "
                f"fewer ranks or more data."
            )
        return EvaluationLoader(StoredPlan(source), layout, self._collate)

    def state_dict(self) -> dict[str, Any]:
        """Position of the last optimizer step and a fingerprint of the data: under 1 kB, the same on every rank."""
        if self._loader is None or self.trainer is None:
            return {}
        position = snapshot(self._cursor, self._loader, self.trainer)
        return {
            "version": _STATE_VERSION,
            **position,
            "global_batch_size": self.global_batch_size,
            "data": self._fingerprint(),
            "stage": self._stage.state() if self._stage is not None else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Args:
            state_dict: What :meth:`state_dict` returned, on any number of ranks.

        Raises:
            DataError: The data or the options that order it are not those of the checkpoint.
        """
        if not self._train_sources:
            return  # the checkpoint was loaded to validate or test
        if state_dict["version"] != _STATE_VERSION:
            raise DataError(
                f"The checkpoint's data position has version {state_dict['version']} and this release reads version "
                f"{_STATE_VERSION}; resume with the release that wrote it."
            )
        if not self._lanes_chosen:
            self._lanes = state_dict["data"]["lanes"]  # "auto" must not change with the batch size in mid-epoch
        compare_fingerprints(state_dict["data"], self._fingerprint())
        self._cursor.position, self._cursor.started = state_dict["position"], False
        self._cursor.batch = state_dict["batch"] * state_dict["global_batch_size"] // self.global_batch_size
        self._align.resume(state_dict["processed"])
        if self._stage is not None:
            self._resume_stage(Stage(**state_dict["stage"]))

    def _resume_stage(self, saved: Stage) -> None:
        """Go on with the saved weights, or begin a stage with new ones at the position reached."""
        weights, position = self._stage.weights if self._stage else {}, self._cursor.position
        self._stage = saved
        plan = self._train_plan()
        if weights != saved.weights and isinstance(plan, MixedPlan):
            self._stage = Stage(weights, position, plan.read_before(position))

    def _fingerprint(self) -> dict[str, Any]:
        order = {"seed": self.seed, "lanes": self._lanes, "window": self._window, "epoch_end": self.epoch_end}
        if self._stage is None:
            return order | self._train_sources["train"].fingerprint()
        sources = self._train_sources.items()
        return order | {f"dataset {name}": digest(source.fingerprint()) for name, source in sources}
