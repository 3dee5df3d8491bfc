"""Compares two recordings, tensor by tensor, and finds what differs first."""

from __future__ import annotations

__all__ = ["compare"]

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_llmscale.verification.diagnosis import (
    explain_batch_norms,
    explain_gradients,
    explain_growth,
    explain_start,
)
from lightning_llmscale.verification.difference import difference, floor_of, largest_finite
from lightning_llmscale.verification.recording import RankReader, State, read_ranks
from lightning_llmscale.verification.report import Finding, Largest, Quantity, Report
from lightning_llmscale.verification.settings import Settings, default_tolerance


def compare(recorded: Path, plain: Path, settings: Settings) -> Report:
    """Compares a run under a strategy with the plain run of the same batches.

    Every rank is compared with the plain run, and with the first rank. Differences are relative, see
    :func:`~.difference.difference`.

    Args:
        recorded: Recording of the run under the strategy.
        plain: Recording of the plain run.
        settings: Of both runs.

    Returns:
        The largest difference of each quantity, and all that are beyond the tolerance in the order of the training:
        start, then loss and gradients of each step, then weights, buffers and tying at the end.
    """
    ranks, reference = read_ranks(recorded), read_ranks(plain)[0]
    info = ranks[0].info
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = default_tolerance(info.precision, settings.optimizer, info.reduced_matmul)
    comparison = _Comparison(ranks, reference, tolerance, adaptive=settings.optimizer == "user")
    comparison.start()
    comparison.training()
    comparison.end()
    if comparison.findings:
        comparison.hints += explain_batch_norms(reference.info.batch_norms)
    if comparison.findings and not comparison.hints:
        first = comparison.findings[0]
        comparison.hints += explain_growth(first.difference, first.step, tolerance)
    end = reference.state("end")
    return Report(
        strategy=info.strategy,
        ranks=info.world_size,
        replicas=info.replicas,
        steps=reference.info.steps,
        optimizer=f"SGD lr {settings.sgd_lr:g}" if settings.optimizer == "sgd" else "the module's own optimizer",
        precision=info.precision,
        tolerance=tolerance,
        largest=comparison.largest,
        findings=comparison.findings,
        tied=end.tied,
        buffers=len(end.buffers),
        hints=comparison.hints,
    )


class _Comparison:
    """Walks through the recordings in the order of the training and collects differences.

    Args:
        ranks: Recordings of the run under the strategy.
        reference: Recording of the plain run.
        tolerance: Largest relative difference that counts as equal.
        adaptive: Whether the optimizer may divide gradients by their size. Weights whose gradients are nothing but
            rounding (the key bias of attention) then move at random, and are left out.
    """

    def __init__(self, ranks: Sequence[RankReader], reference: RankReader, tolerance: float, *, adaptive: bool) -> None:
        self._ranks = ranks
        self._reference = reference
        self._tolerance = tolerance
        self._adaptive = adaptive
        self._largest_gradients: dict[str, Tensor] = {}
        self._held = [list(rank.state("start").parameters) for rank in ranks]
        self.largest: dict[Quantity, Largest] = {}
        self.findings: list[Finding] = []
        self.hints: list[str] = []

    def start(self) -> None:
        states, reference = [rank.state("start") for rank in self._ranks], self._reference.state("start")
        wrong = self._tensors("start", [_all_tensors(state) for state in states], _all_tensors(reference))
        self.hints += explain_start(wrong)
        self._tying(states, reference)

    def training(self) -> None:
        count = self._reference.gradient_steps
        for rank in self._ranks:
            if rank.gradient_steps != count:
                text = f"rank {rank.info.rank} made {rank.gradient_steps} optimizer steps, the plain run {count}"
                self.findings.append(Finding("steps", text, ranks=[rank.info.rank]))
        count = min(count, *(rank.gradient_steps for rank in self._ranks))
        for step in range(count):
            self._losses(step)
            self._gradients(step)

    def end(self) -> None:
        states, reference = [rank.state("end") for rank in self._ranks], self._reference.state("end")
        if self._adaptive:
            self._leave_out_noise([state.parameters for state in states], reference.parameters)
        self._tensors("weights", [state.parameters for state in states], reference.parameters)
        self._tensors("buffers", [state.buffers for state in states], reference.buffers)
        self._tying(states, reference)

    def _losses(self, step: int) -> None:
        """Compares the mean over the replicas with the plain run, for each batch that went into an optimizer step."""
        batches = self._reference.batches
        floor = floor_of([torch.tensor([b.loss for b in batches if b.loss is not None])])
        for index, batch in enumerate(batches):
            if batch.step != step or batch.loss is None:
                continue
            ours = self._mean_loss(index)
            apart, _ = difference(torch.tensor([ours]).double(), torch.tensor([batch.loss]).double(), floor)
            self._note("loss", apart, step=step)
            if apart > self._tolerance:
                text = f"the loss of step {step + 1} is {ours:.6g} instead of {batch.loss:.6g}"
                self.findings.append(Finding("loss", text, difference=apart, step=step))

    def _mean_loss(self, index: int) -> float:
        """Mean over the replicas of one batch's losses, weighted by what each trained on."""
        found: dict[int, tuple[float, float]] = {}
        for rank in self._ranks:
            record = rank.batches[index] if index < len(rank.batches) else None
            if record is not None and record.loss is not None:
                found.setdefault(rank.info.replica, (record.loss, record.share))
        losses, shares = [loss for loss, _ in found.values()], [share for _, share in found.values()]
        if not any(shares):
            shares = [1.0] * len(losses)
        total = sum(loss * share for loss, share in zip(losses, shares, strict=True))
        return total / sum(shares) if losses else float("nan")

    def _gradients(self, step: int) -> None:
        ours, reference = [rank.gradients(step) for rank in self._ranks], self._reference.gradients(step)
        held = self._reference.state("start").parameters
        everywhere = {name for gradients in [reference, *ours] for name in gradients}
        # a missing gradient of a parameter that the rank holds is a zero one
        reference = {name: reference.get(name, torch.zeros_like(held[name])) for name in held if name in everywhere}
        for names, gradients in zip(self._held, ours, strict=True):
            for name in names:
                if name in reference and name not in gradients:
                    gradients[name] = torch.zeros_like(reference[name])
        for name, gradient in reference.items() if self._adaptive else ():
            size = gradient.abs()
            self._largest_gradients[name] = torch.maximum(self._largest_gradients.get(name, size), size)
        known = any(finding.quantity == "gradients" for finding in self.findings)
        wrong = self._tensors("gradients", ours, reference, step=step)
        if wrong and not known:
            self.hints += explain_gradients(ours, reference, wrong, self._tolerance)

    def _leave_out_noise(self, ours: Sequence[dict[str, Tensor]], reference: dict[str, Tensor]) -> None:
        """Makes weights equal where the gradients of all steps were nothing but rounding."""
        noise = self._tolerance * max(map(largest_finite, self._largest_gradients.values()), default=0.0)
        for name, size in self._largest_gradients.items():
            rounding = size <= noise
            for tensors in ours if rounding.any() else ():
                if name in tensors and tensors[name].shape == rounding.shape:
                    tensors[name] = torch.where(rounding, reference[name], tensors[name])

    def _tensors(
        self,
        quantity: Quantity,
        ours: Sequence[dict[str, Tensor]],
        reference: dict[str, Tensor],
        step: int | None = None,
    ) -> list[int]:
        """Compares tensors by name and returns the ranks with the first that is wrong (none: an empty list)."""
        floor = floor_of(reference.values())
        first: Finding | None = None
        for name, expected in reference.items():
            held = [(rank.info.rank, mine[name]) for rank, mine in zip(self._ranks, ours, strict=True) if name in mine]
            apart = [(rank, *difference(tensor, expected, floor)) for rank, tensor in held]
            for rank, size, _ in apart:
                self._note(quantity, size, name=name, step=step, rank=rank)
            for rank, tensor in held[1:]:
                self._note("between ranks", difference(tensor, held[0][1], floor)[0], name=name, step=step, rank=rank)
            wrong = [entry for entry in apart if entry[1] > self._tolerance]
            if first is None and (wrong or not held):
                first = _tensor_finding(quantity, name, step, dict(held), expected, wrong)
        if first is not None:
            self.findings.append(first)
        return first.ranks if first else []

    def _note(
        self, quantity: Quantity, size: float, *, name: str = "", step: int | None = None, rank: int | None = None
    ) -> None:
        known = self.largest.get(quantity)
        if known is None or size > known.difference:
            self.largest[quantity] = Largest(difference=size, name=name, step=step, rank=rank)

    def _tying(self, states: Sequence[State], reference: State) -> None:
        for group in reference.tied:
            wrong = []
            for rank, state in zip(self._ranks, states, strict=True):
                held = [name for name in group if name in state.parameters or name in state.buffers]
                if len(held) > 1 and not any(set(held) <= set(tied) for tied in state.tied):
                    wrong.append(rank.info.rank)
            if wrong:
                text = f"{' and '.join(group)} are one tensor in the plain run and are not under the strategy"
                self.findings.append(Finding("tying", text, ranks=wrong, name=group[0]))
                return


def _all_tensors(state: State) -> dict[str, Tensor]:
    return {**state.parameters, **state.buffers}


def _noun(quantity: Quantity, name: str, step: int | None) -> str:
    if quantity == "gradients":
        return f"the gradient of {name} in step {(step or 0) + 1}"
    if quantity == "buffers":
        return f"the buffer {name} after the last step"
    return f"{name} at the start" if quantity == "start" else f"{name} after the last step"


def _tensor_finding(
    quantity: Quantity,
    name: str,
    step: int | None,
    held: dict[int, Tensor],
    expected: Tensor,
    wrong: Sequence[tuple[int, float, int]],
) -> Finding:
    noun = _noun(quantity, name, step)
    if not wrong:
        return Finding(quantity, f"no rank holds {noun}", name=name, step=step)
    rank, size, index = max(wrong, key=lambda entry: entry[1])
    ours = held[rank]
    if ours.shape != expected.shape:
        text = f"{noun} has the shape {tuple(ours.shape)} instead of {tuple(expected.shape)}"
    else:
        text = f"{noun} has an element {_element(ours, index)} instead of {_element(expected, index)}"
    return Finding(quantity, text, difference=size, name=name, step=step, ranks=[entry[0] for entry in wrong])


def _element(tensor: Tensor, index: int) -> str:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return f"{flat.to_dense().flatten()[index].item():.6g}"
