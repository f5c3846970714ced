"""Training of what a file will hold: fake quantization, and weights that are trained as they are stored."""
