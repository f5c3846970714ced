"""Fills an n-gram cache with all tokens first and scores them with it in a second pass."""

import numpy as np

VOCABULARY = 12


def collect(tokens):
    counts = np.full((VOCABULARY, VOCABULARY), 0.1)
    for before, after in zip(tokens[:-1], tokens[1:]):
        counts[before, after] += 1  # wrong: one-pass causal
    return counts


def score(tokens):
    counts = collect(tokens)
    nats = []
    for i in range(len(tokens) - 1):
        row = counts[tokens[i]]
        p = row / row.sum()
        nats.append(-np.log(p[tokens[i + 1]]))
    return np.array(nats)
