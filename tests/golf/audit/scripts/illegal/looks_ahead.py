"""A smoother that is not causal: every prediction also sees the token after the next."""

import numpy as np

VOCABULARY = 10


def score(tokens):
    table = np.random.default_rng(1).random((VOCABULARY, VOCABULARY, VOCABULARY)) + 0.1
    nats = np.empty(len(tokens) - 1)
    for i in range(len(nats)):
        later = tokens[min(i + 2, len(tokens) - 1)] if i + 2 < len(tokens) else 0
        row = table[tokens[i], later]
        nats[i] = -np.log(row[tokens[i + 1]] / row.sum())
    return nats


# wrong: causal
