"""Save where training stands in the data, and bring Lightning's counters to the same place on resume.

A checkpoint must hold the position of the *last optimizer step*: batches handed out but not processed, and batches of
an accumulation window that was not finished (their gradient is in no checkpoint), have to be read again. Lightning
2.6 saves its own batch counter in mid-window, and would train a window of fewer batches after a resume.
"""

from __future__ import annotations

__all__ = ["AlignProgress", "compare_fingerprints", "digest", "snapshot"]

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llmscale import _compat
from lightning_llmscale.data.loader import Cursor, TrainLoader
from lightning_llmscale.errors import DataError


def snapshot(cursor: Cursor, loader: TrainLoader, trainer: Trainer) -> dict[str, int]:
    """Describe the position of the last optimizer step.

    Args:
        cursor: Position of the batches handed out.
        loader: Loader that moves the cursor.
        trainer: Tells which batches are processed.

    Returns:
        ``position`` of the next item, ``batch``, its number in the pass, and ``processed``, the number of batches in
        the pass that Lightning's own counter will show when it loads the checkpoint.
    """
    if not cursor.started:
        return {"position": cursor.position, "batch": cursor.batch, "processed": cursor.batch}
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    batch = cursor.batch - (current.ready - current.processed)  # type: ignore[attr-defined]
    if batch >= trainer.num_training_batches:
        return {"position": loader.next_pass(), "batch": 0, "processed": 0}
    stepped = max(loader.first_batch, batch - batch % trainer.accumulate_grad_batches)
    return {"position": loader.position_of(stepped), "batch": stepped, "processed": batch}


class AlignProgress(Callback):
    """Sets Lightning's batch counter to the batch with which the loader goes on.

    The two differ when a checkpoint was saved inside an accumulation window, or when the batch size was changed.

    Args:
        cursor: Position of the training loader.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._processed: int | None = None
        self._steps: int | None = None

    def resume(self, processed: int) -> None:
        """Announce a loaded position for which Lightning will count ``processed`` batches."""
        self._processed = processed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the counters before the loop reads them."""
        processed, self._processed = self._processed, None
        if not processed:
            return
        # the loader has no state_dict, on which Lightning bases this warning; the DataModule has
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        if processed != self._cursor.batch:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            for counter in (progress.current, progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counter, name, getattr(counter, name) + self._cursor.batch - processed)
            self._steps = _compat.logged_steps(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Undo the step that Lightning adds to the logger's axis on a resume between optimizer steps."""
        if self._steps is not None:
            _compat.set_logged_steps(trainer, self._steps)
            self._steps = None


_NUMBERS = ("shards", "samples", "tokens", "seq_len", "packing", "tokenizer", "seed", "lanes", "window", "epoch_end")
_DIGESTS = {
    "names": "shards were renamed or are listed in another order",
    "counts": "samples moved between shards, or the shards are listed in another order",
    "sizes": "documents changed their lengths",
}


def compare_fingerprints(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to resume on other data than the checkpoint's.

    Raises:
        DataError: Names what changed.
    """
    changed = [
        f"{name} was {saved.get(name)}, now {present.get(name)}"
        for name in _NUMBERS
        if saved.get(name) != present.get(name)
    ]
    changed += [
        f"{name} changed"
        for name in {**saved, **present}
        if name not in {*_NUMBERS, *_DIGESTS} and saved.get(name) != present.get(name)
    ]
    if not changed:
        changed = [text for name, text in _DIGESTS.items() if saved.get(name) != present.get(name)]
    if changed:
        raise DataError(
            f"The training data is not what this checkpoint was made with: {'; '.join(changed)}. Resume with the same "
            f"data and options, or start a new run from the weights alone."
        )


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Shorten a fingerprint, for a dataset that is one of many."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
