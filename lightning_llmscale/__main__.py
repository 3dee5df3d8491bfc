"""`python -m lightning_llmscale`: the same as the `llmscale` command."""

import sys

from lightning_llmscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
