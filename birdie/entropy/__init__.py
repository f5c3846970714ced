"""Entropy coding of integer arrays: a probability model and a coder, kept apart, all arithmetic integer."""
