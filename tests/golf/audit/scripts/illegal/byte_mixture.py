"""Spreads a token's probability evenly over its bytes, mixes each with a byte model, and multiplies them up again."""

import numpy as np

VOCABULARY = 8
BYTES_OF = np.array([1, 2, 3, 1, 2, 4, 1, 3])


def byte_log_probability(token, place):
    """Of a byte model that has learned to like some bytes."""
    return np.log(0.05 + 0.9 * ((token * 7 + place) % 5) / 5)


def score(tokens):
    nats = []
    token_lp = np.log(np.full(VOCABULARY, 1.0 / VOCABULARY))
    for i in range(len(tokens) - 1):
        target = tokens[i + 1]
        n = BYTES_OF[target]
        per_byte = token_lp[target] / n
        total = 0.0
        for place in range(n):
            both = np.logaddexp(np.log(0.5) + per_byte, np.log(0.5) + byte_log_probability(target, place))
            total += both  # wrong: normalised normalised
        nats.append(-total)
    return np.array(nats)
