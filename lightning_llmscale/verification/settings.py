"""What `verify` does and when it calls two runs equal."""

from __future__ import annotations

__all__ = ["DEFAULT_LR", "Settings", "default_tolerance"]

from dataclasses import dataclass
from typing import Literal

from lightning_llmscale.errors import ConfigurationError

#: Learning rate of the SGD that replaces the user's optimizer: large enough that eight steps move every weight by far
#: more than rounding, small enough that rounding does not grow.
DEFAULT_LR = 0.01

#: Largest relative difference that counts as rounding, by Lightning's name of the precision. Right strategies showed at
#: most 2.5e-6 (fp32), 2.4e-15 (fp64), 9e-3 (16 bits, mixed or fp16) and 0.13 (bf16-true) on GPTs of up to 5 million
#: parameters: in 16 bits another order of summation moves the gradient of a bias by many units in its last place.
_TOLERANCES = {
    "64-true": 1e-10,
    "32-true": 1e-5,
    "16-mixed": 5e-2,
    "16-true": 5e-2,
    "bf16-mixed": 5e-2,
    "bf16-true": 0.25,
}
_LOOSEST = 0.25
_REDUCED_MATMUL = 1e-3
#: An adaptive optimizer divides small gradients by their own size and so enlarges their rounding.
_USER_OPTIMIZER_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of one verification.

    Raises:
        ConfigurationError: If a value is out of range or cannot take effect.
    """

    steps: int = 8
    """Optimizer steps of both runs. A run may end earlier by its own `max_steps` or `max_epochs`."""
    optimizer: Literal["sgd", "user"] = "sgd"
    """`sgd` replaces each optimizer of the module by plain SGD over the same parameters, because AdamW cancels the
    scale of a gradient and would hide a sum taken for a mean; `user` keeps the module's optimizers and schedules."""
    lr: float | None = None
    """Learning rate of that SGD; `None` means 0.01."""
    tolerance: float | None = None
    """Largest relative difference that counts as equal; `None` takes the one of the precision."""
    keep_dropout: bool = False
    """Whether dropout stays on. Ranks draw other masks than one process does, so it is switched off by default."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps={self.steps}: verify needs at least one optimizer step, for example 8.")
        if self.optimizer not in ("sgd", "user"):
            raise ConfigurationError(f"optimizer={self.optimizer!r}: choose 'sgd' or 'user'.")
        if self.lr is not None and self.optimizer == "user":
            raise ConfigurationError(
                f"lr={self.lr:g} cannot take effect with optimizer='user', which keeps the module's own learning rate: "
                "leave out one of the two."
            )
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ConfigurationError(f"lr={self.lr:g}: the learning rate must be a positive number, for example 0.01.")
        if self.tolerance is not None and not 0 <= self.tolerance < float("inf"):
            raise ConfigurationError(f"tolerance={self.tolerance:g}: give a number from 0 on, for example 1e-5.")

    @property
    def sgd_lr(self) -> float:
        """Learning rate of the SGD that replaces the module's optimizers."""
        return DEFAULT_LR if self.lr is None else self.lr


def default_tolerance(precision: str, optimizer: Literal["sgd", "user"], reduced_matmul: bool = False) -> float:
    """Largest relative difference between two correct runs.

    Args:
        precision: Lightning's name, for example ``32-true`` or ``bf16-mixed``.
        optimizer: As in :class:`Settings`.
        reduced_matmul: Whether fp32 matrix products run in TF32 or bf16 (``torch.set_float32_matmul_precision``).
    """
    tolerance = _TOLERANCES.get(precision, _LOOSEST)
    if reduced_matmul and precision == "32-true":
        tolerance = _REDUCED_MATMUL
    return tolerance * (_USER_OPTIMIZER_FACTOR if optimizer == "user" else 1.0)
