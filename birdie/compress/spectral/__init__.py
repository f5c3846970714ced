"""Spectral compression: transforms, scans of their coefficients, and training with a learned rate."""
