"""`llmscale fit | validate | test | predict`: LightningCLI that knows our strategies and speaks briefly."""

from __future__ import annotations

__all__ = ["LlmscaleCLI", "LlmscaleTrainer", "run"]

import copy
import os
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_llmscale.cli.checks import check_checkpoint, check_writable
from lightning_llmscale.cli.parser import LlmscaleParser
from lightning_llmscale.cli.strategy_names import check_strategy_name, import_named_classes
from lightning_llmscale.data import WebDatasetDataModule
from lightning_llmscale.errors import ConfigurationError

# argparse would list a hundred options before the first explanation
_USAGE = """llmscale {0} [--config FILE] [--model CLASS] [--data CLASS] [--trainer.OPTION VALUE] ...

  llmscale {0} --config run.yaml --trainer.devices=2 --trainer.strategy=RingAllReduceStrategy
  llmscale {0} --trainer.strategy.help=CLASS    options of a strategy; likewise --model.help, --data.help
  llmscale {0} --config run.yaml --print_config    the complete configuration, to save and edit"""


class LlmscaleTrainer(Trainer):
    """Lightning's Trainer whose `strategy` is read as a class first and as a name second.

    Lightning declares ``str | Strategy``, so a parser takes the class path ``package.MyStrategy`` for a name and fails.
    In the other order a class path, or the bare name of an imported class, becomes the class; ``ddp`` stays a name.
    """

    def __init__(self, *, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        """Forwards to Lightning's Trainer (jsonargparse follows the forwarding and offers every option of it).

        Args:
            strategy: How to train on several processes: a class path, a bare class name or a registered name.
                `llmscale strategies` lists them.
        """
        super().__init__(strategy=strategy, **kwargs)


class LlmscaleCLI(LightningCLI):
    """LightningCLI with the strategies of this package registered and every mistake found before a process starts.

    Args:
        argv: The command line without the program's name, subcommand first.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        super().__init__(
            trainer_class=LlmscaleTrainer,
            parser_class=LlmscaleParser,
            parser_kwargs={"prog": "llmscale", **{name: {"usage": _USAGE.format(name)} for name in self.subcommands()}},
            save_config_kwargs={"overwrite": True},  # without a logger a second run writes to the same folder
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(self._argv)
        options = self.config[self.config.subcommand]
        if not isinstance(options.trainer, Namespace):
            raise ConfigurationError(
                f"trainer: {options.trainer!r} holds no options; write a mapping such as max_steps: 5."
            )
        check_strategy_name(options.trainer.strategy)
        check_checkpoint(options.get("ckpt_path"))

    @override
    def after_instantiate_classes(self) -> None:
        # Found out here, a bad shard stops one process; found out by Lightning, it stops every rank it has started.
        # A copy is asked, because the ranks must find the DataModule as new.
        if isinstance(self.datamodule, WebDatasetDataModule) and _starts_ranks():
            stage = str(self.config.subcommand)
            sampling = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
            self.datamodule.check_replicas(sampling["num_replicas"] if sampling else 1)
            copy.deepcopy(self.datamodule).setup(stage)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, ModuleNotFoundError) as error:
            remedy = " Give a number of at least 1 or auto." if "devices=" in str(error) else ""
            raise ConfigurationError(f"{error}{remedy}") from error
        _check_world_size(trainer)
        check_writable("trainer.default_root_dir", trainer.default_root_dir)
        for logger in trainer.loggers:
            check_writable("the logger's save_dir", logger.save_dir)
        for callback in trainer.checkpoint_callbacks:
            check_writable("the checkpoint callback's dirpath", getattr(callback, "dirpath", None))
        return trainer


def _check_world_size(trainer: Trainer) -> None:
    """Asks what Lightning asks after the launch, so that a wrong number of processes ends without a traceback."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        return
    try:
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
    except ValueError as error:
        raise ConfigurationError(
            f"{error} Give the launcher and trainer.devices the same number of processes."
        ) from error


def _starts_ranks() -> bool:
    """Whether this process is the one a user or a scheduler started, and not a rank of a run under way."""
    return "LOCAL_RANK" not in os.environ


def run(args: list[str]) -> int:
    """Runs ``args[0]``, one of fit, validate, test and predict, with the options in ``args[1:]``.

    Returns:
        0; a failure raises.
    """
    import_named_classes()
    LlmscaleCLI(args)
    return 0
