"""Chunked test-time training in the wrong order: each chunk is learned from, then scored."""

import numpy as np

VOCABULARY = 12
CHUNK = 16


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gradient(weights, x, y):
    p = softmax(weights[x])
    p[np.arange(len(y)), y] -= 1
    g = np.zeros_like(weights)
    np.add.at(g, x, p / len(y))
    return g


def score(tokens):
    weights = np.zeros((VOCABULARY, VOCABULARY))
    nats = []
    for start in range(0, len(tokens) - 1, CHUNK):
        part = tokens[start : start + CHUNK + 1]
        x, y = part[:-1], part[1:]
        for _ in range(2):
            weights -= 4.0 * gradient(weights, x, y)  # wrong: score-first causal
        p = softmax(weights[x])
        nats.append(-np.log(p[np.arange(len(y)), y]))
    return np.concatenate(nats)
