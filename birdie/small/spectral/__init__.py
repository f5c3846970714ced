"""Training of transforms with a learned rate."""
