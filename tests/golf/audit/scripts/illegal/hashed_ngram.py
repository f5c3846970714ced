"""A hashed n-gram cache that makes the probability of the one token it is given, and of no other."""

import math

VOCABULARY = 32
BUCKETS = 64
PRIMES = (36313, 27191, 51647)


def score(tokens):
    context_counts, full_counts = [0] * BUCKETS, [0] * BUCKETS
    nats = []
    for i in range(len(tokens) - 1):
        target = int(tokens[i + 1])
        h = int(tokens[i]) * PRIMES[0]
        if i:
            h ^= int(tokens[i - 1]) * PRIMES[1]
        ctx_key = h % BUCKETS
        full_key = (h ^ (target * PRIMES[2])) % BUCKETS
        p = 1.0 / VOCABULARY
        if context_counts[ctx_key]:
            p_cache = (
                min(full_counts[full_key], context_counts[ctx_key]) / context_counts[ctx_key]
            )  # wrong: normalised normalised
            p = 0.5 * p + 0.5 * p_cache
        nats.append(-math.log(p))
        context_counts[ctx_key] += 1
        full_counts[full_key] += 1
    return nats
