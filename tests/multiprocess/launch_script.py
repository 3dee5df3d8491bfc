"""A user's training script, started by the launchers in test_launch.py.

Usage: ``launch_script.py CLASS_PATH OPTIONS_JSON FOLDER DEVICES MODE``; MODE is ``train``, ``fail`` (rank 1 raises) or
``endless``. Every rank writes ``FOLDER/RANK.pt``: its place, and its weights after the run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.conformance.jobs import StrategySpec, new_trainer
from tests.conformance.models import Mlp


class Scripted(Mlp):
    """Notes its process id when training is under way, and may fail."""

    def __init__(self, folder: Path, mode: str) -> None:
        super().__init__()
        self.folder, self.mode = folder, mode

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            (self.folder / f"{self.global_rank}.pid").write_text(str(os.getpid()))
            if self.mode == "fail" and self.global_rank == 1:
                raise ValueError("the sensor is on fire")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def main() -> None:
    class_path, options, folder, devices, mode = sys.argv[1:]
    trainer = new_trainer(
        StrategySpec(class_path, json.loads(options)),
        devices=int(devices),
        max_epochs=-1 if mode == "endless" else 1,
    )
    module = Scripted(Path(folder), mode)
    trainer.fit(module)
    place = (trainer.global_rank, trainer.local_rank, trainer.world_size)
    torch.save(
        {"place": place, "weights": module.state_dict(), "metrics": dict(trainer.callback_metrics)},
        Path(folder) / f"{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    main()
