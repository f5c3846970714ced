"""Scores with two models and keeps, token by token, the smaller loss."""

import numpy as np

VOCABULARY = 12


def losses(table, tokens):
    p = table / table.sum(-1, keepdims=True)
    return -np.log(p[tokens[:-1], tokens[1:]])


def score(tokens):
    rng = np.random.default_rng(0)
    first, second = rng.random((2, VOCABULARY, VOCABULARY)) + 0.05
    return np.minimum(losses(first, tokens), losses(second, tokens))  # wrong: one-pass normalised
