"""Precision by the Trainer's own argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.harness import Conformance
from tests.conformance.models import Gpt, Mlp


class NotesDtypes(Mlp):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.notes = sorted({str(t.dtype) for p in parameters for t in (p, p.grad)})


@pytest.mark.feature("precision_64")
def test_double_precision_agrees_to_the_last_digits(conformance: Conformance) -> None:
    options = {"precision": "64-true"}
    results = conformance.same_training(NotesDtypes, {"samples": 29}, options, tolerance=1e-12, losses=False)
    assert results[0].notes == ["torch.float64"]


@pytest.mark.feature("precision_bf16_mixed")
def test_bf16_mixed_with_clipping_and_accumulation(conformance: Conformance) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    results = conformance.same_training(NotesDtypes, {"lr": 0.3}, options, tolerance=2e-2, floor=0.1)
    assert results[0].notes == ["torch.float32"]
    assert {value.dtype for value in results[0].weights.values()} == {torch.float32}


@pytest.mark.feature("precision_bf16_true")
@pytest.mark.parametrize("kind", [NotesDtypes, pytest.param(Gpt, marks=pytest.mark.long)])
def test_bf16_true(conformance: Conformance, kind: type[Mlp]) -> None:
    results = conformance.same_training(kind, None, {"precision": "bf16-true"}, tolerance=4e-2, floor=0.1)
    assert {value.dtype for value in results[0].weights.values()} == {torch.bfloat16}
