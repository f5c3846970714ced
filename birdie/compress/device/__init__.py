"""Compressed tensors in the memory of a GPU: decoding and encoding there, by Triton kernels."""
