"""The language model: its configuration, one forward definition, and sampling from it."""
