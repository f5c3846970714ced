"""Spectral compression: transforms, the order their coefficients are coded in, and weights trained to be small."""
