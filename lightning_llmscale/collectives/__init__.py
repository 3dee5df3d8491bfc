"""Sums over ranks: the ring and shared-memory all-reduce, their thread and DDP hook, and the control plane."""
