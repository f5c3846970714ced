"""Quantization schemes: one file each, with options, encoder, layout and decoder."""
