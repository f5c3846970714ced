"""Compressed tensors in the memory of a GPU: decoding and quantization there, by Triton kernels."""
