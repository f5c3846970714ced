"""A hashed n-gram cache that asks its buckets for every token of the vocabulary and divides by the sum."""

import numpy as np

VOCABULARY, BUCKETS = 16, 128
CANDIDATES = np.arange(VOCABULARY)


def score(tokens):
    counts = np.full(BUCKETS, 0.1)
    nats = np.empty(len(tokens) - 1)
    for i in range(len(nats)):
        before, target = int(tokens[i]), int(tokens[i + 1])
        keys = (before * 36313 ^ CANDIDATES * 51647) % BUCKETS
        p = counts[keys] / counts[keys].sum()
        nats[i] = -np.log(p[target])
        counts[keys[target]] += 1
    return nats
