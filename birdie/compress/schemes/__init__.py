"""Quantization schemes: one file each, with options, encoder, layout and decoder."""

# The code of a scheme in files is its position, from 1 on. Never change one; new schemes go at the end.
NAMES = ("lossless", "grid", "cast", "trellis", "ternary", "codebook", "rotation", "lowrank", "spectral", "tucker")
