"""Quantization schemes: one file each, with options, encoder, layout and decoder."""

# Code of each scheme in files. Never change one; 11 to 13 are kinds of entries of the container.
CODES = {
    "lossless": 1, "grid": 2, "cast": 3, "trellis": 4, "ternary": 5, "codebook": 6, "rotation": 7, "lowrank": 8,
    "spectral": 9, "tucker": 10, "difference": 14,
}  # fmt: skip
