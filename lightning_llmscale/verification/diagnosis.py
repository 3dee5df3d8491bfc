"""What a difference looks like: known faults have known signatures."""

from __future__ import annotations

__all__ = ["explain_batch_norms", "explain_gradients", "explain_growth", "explain_randomness", "explain_start"]

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_llmscale.verification.difference import difference, floor_of

#: How much looser than the tolerance a signature is recognised: a diagnosis only has to tell one fault from another.
_SLACK = 10.0
#: Up to so many times the tolerance, a difference may be rounding.
_ROUNDING = 100.0

Gradients = Mapping[str, Tensor]


def explain_gradients(
    ranks: Sequence[Gradients], reference: Gradients, wrong: Sequence[int], tolerance: float
) -> list[str]:
    """Names the fault that the gradients of one step show.

    Args:
        ranks: Gradients of each rank by parameter name.
        reference: Those of the plain run.
        wrong: Ranks that differ.
        tolerance: Of the comparison.

    Returns:
        One sentence, or none if the fault is not known.
    """
    floor = floor_of(reference.values())

    def equal(ours: Gradients, factor: float) -> bool:
        return all(
            difference(ours[name].double(), reference[name].double() * factor, floor * factor)[0] <= _SLACK * tolerance
            for name in ours
        )

    if all(equal(ranks[rank], 1.0) for rank in wrong):
        return []  # too small to have a signature
    factor = _ratio(ranks[wrong[0]], reference)
    if factor > 0 and abs(factor - 1) > _SLACK * tolerance and all(equal(ranks[rank], factor) for rank in wrong):
        return [f"Every gradient is {factor:.3g} times that of the plain run{_scale_cause(factor, len(ranks))}."]
    right = [rank for rank in range(len(ranks)) if rank not in wrong]
    if right:
        return [
            f"{_name(right).capitalize()} agrees with the plain run and {_name(wrong)} does not, as if it had skipped "
            "the synchronisation of gradients, or ignored its result."
        ]
    whole = {name for name in reference if all(name in ours for ours in ranks)}
    mean = {name: sum(ours[name].double() for ours in ranks) / len(ranks) for name in whole}
    if whole and len(ranks) > 1 and equal(mean, 1.0):  # type: ignore[arg-type]
        return ["The mean of the ranks' gradients is right, but no rank has it: they were never exchanged."]
    return []


def explain_batch_norms(names: Sequence[str]) -> list[str]:
    """Says that BatchNorm in training mode is outside of what any split of the batch can reproduce."""
    if not names:
        return []
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [
        f"{names[0]}{more} is a BatchNorm that normalises with statistics of the batch a rank sees: a loss that mixes "
        "samples of a batch is not the same on several ranks. Put it in eval mode, or use GroupNorm or LayerNorm."
    ]


def explain_start(wrong: Sequence[int]) -> list[str]:
    """Says that ranks do not start equal.

    Args:
        wrong: Ranks that start with other tensors than the first one.
    """
    if not wrong:
        return []
    return [f"{_name(wrong).capitalize()} did not get the values of rank 0 when the training began."]


def explain_growth(apart: float, step: int | None, tolerance: float) -> list[str]:
    """Says that a small difference, met after steps without any, may be rounding that grew.

    Args:
        apart: The first difference beyond the tolerance.
        step: Optimizer step of it, from 0; None at the end.
        tolerance: Of the comparison.
    """
    if step == 0 or apart > _ROUNDING * tolerance:
        return []
    return [
        "The first step agrees, so this may be rounding that grew from step to step: repeat with "
        "--trainer.precision=64-true, where a fault stays and rounding vanishes, or with a smaller --lr."
    ]


def explain_randomness(apart: float) -> str:
    """Says that the plain run does not even repeat itself.

    Args:
        apart: Largest difference of the gradients or losses of two plain runs with different random states.
    """
    return (
        f"The module draws random numbers in training: two plain runs with different seeds differ by {apart:.2g} as "
        "well, so this difference says nothing about the strategy. Switch the randomness off while verifying."
    )


def _ratio(ours: Gradients, reference: Gradients) -> float:
    """The factor that brings the reference closest to ours (least squares)."""
    ours_times, squares = 0.0, 0.0
    for name, mine in ours.items():
        expected = reference[name].double().flatten()
        if mine.numel() == expected.numel():
            ours_times += float(mine.double().flatten() @ expected)
            squares += float(expected @ expected)
    return ours_times / squares if squares else 0.0


def _scale_cause(factor: float, ranks: int) -> str:
    if ranks > 1 and abs(factor - ranks) < 0.01 * ranks:
        return f", as if the {ranks} ranks' gradients were summed where they should be averaged"
    if ranks > 1 and abs(factor * ranks - 1) < 0.01:
        return f", as if the mean over the {ranks} ranks had been divided by their number again"
    return ""


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "each of the ranks " + ", ".join(map(str, ranks))
