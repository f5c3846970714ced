"""Sliding windows of a fixed model: each window scores its last few targets, every target once."""

import numpy as np

VOCABULARY, LENGTH, STRIDE = 12, 16, 4
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))


def log_probabilities(inputs):
    """Each position sees an average over what came before it in the window."""
    mean = np.cumsum(TABLE[inputs], 0) / np.arange(1, len(inputs) + 1)[:, None] + TABLE[inputs]
    shifted = mean - mean.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def score(tokens):
    targets = len(tokens) - 1
    nats = np.full(targets, np.nan)
    for begin in range(0, targets, STRIDE):
        end = min(begin + LENGTH, targets)
        first = begin if begin == 0 else begin + LENGTH - STRIDE
        if first >= targets:
            break
        logp = log_probabilities(tokens[begin:end])
        y = tokens[begin + 1 : end + 1]
        nats[first:end] = -logp[np.arange(len(y)), y][first - begin :]
    return nats
