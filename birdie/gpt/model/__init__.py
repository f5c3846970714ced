"""The language model: its settings, one forward definition shared by training and scoring, and sampling from it."""
