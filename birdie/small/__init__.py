"""Training of what is stored: weights that are small when they are coded, for any module."""
