"""Tensors stored relative to another: coding, lossy products, jobs, and nearly equal tensors of one file."""
