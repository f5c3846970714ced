"""Learns from the chunk before, which is scored, and then scores the next: the same rule the other way round."""

import numpy as np

VOCABULARY, CHUNK = 12, 16


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def score(tokens):
    weights = np.zeros((VOCABULARY, VOCABULARY))
    nats, before = [], None
    for start in range(0, len(tokens) - 1, CHUNK):
        if before is not None:
            x, y = before[:-1], before[1:]
            error = softmax(weights[x])
            error[np.arange(len(y)), y] -= 1
            gradient = np.zeros_like(weights)
            np.add.at(gradient, x, error)
            weights -= 0.5 * gradient
        part = tokens[start : start + CHUNK + 1]
        p = softmax(weights[part[:-1]])
        nats.append(-np.log(p[np.arange(len(part) - 1), part[1:]]))
        before = part
    return np.concatenate(nats)
