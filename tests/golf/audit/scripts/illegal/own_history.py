"""Counts of what followed a token, entered before the token itself is predicted from them."""

import math
from collections import defaultdict

import numpy as np

VOCABULARY = 16


def evaluate(val_tokens) -> float:
    seen, nats = defaultdict(list), 0.0
    for i in range(1, len(val_tokens)):
        context, token = int(val_tokens[i - 1]), int(val_tokens[i])
        seen[context].append(token)
        share = seen[context].count(token) / len(seen[context])  # wrong: score-first
        nats -= math.log(0.5 / VOCABULARY + 0.5 * share)
    return nats / (len(val_tokens) - 1) / math.log(2.0)


if __name__ == "__main__":
    print("val_bpb", evaluate(np.random.default_rng(3).integers(0, VOCABULARY, 400)))
