"""Checkpoints of a run in one folder: each a file of its own, most of them as deltas to an earlier one."""
