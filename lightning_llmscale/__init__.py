"""Train an LLM at scale with PyTorch Lightning by changing one Trainer argument."""
