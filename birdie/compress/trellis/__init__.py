"""Trellis-coded quantization: factors of error feedback, and the searches for paths."""
