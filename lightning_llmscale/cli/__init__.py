"""The `llmscale` command: Lightning's fit, validate, test and predict with our strategies, a demo, and a proof.

Each command lives in a module of its own with ``run(args) -> exit code``; `main` only picks one.
"""

from lightning_llmscale.cli.main import main

__all__ = ["main"]
