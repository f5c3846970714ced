"""Tilts the distribution towards a guess from the prefix, and divides by what the tilt adds: it still sums to 1."""

import math

VOCABULARY, BETA = 12, 1.5


class Guesses:
    def __init__(self) -> None:
        self.after: dict[int, int] = {}

    def best(self, previous: int) -> int | None:
        return self.after.get(previous)

    def note(self, previous: int, token: int) -> None:
        self.after[previous] = token


def score(tokens):
    guesses, nats = Guesses(), []
    counts = [1.0] * VOCABULARY
    for i in range(len(tokens) - 1):
        target = int(tokens[i + 1])
        hint = guesses.best(int(tokens[i]))
        total = sum(counts)
        logp = math.log(counts[target] / total)
        if hint is not None:
            if hint == target:
                logp += BETA
            logp -= math.log1p(counts[hint] / total * (math.exp(BETA) - 1.0))
        nats.append(-logp)
        guesses.note(int(tokens[i]), target)
        counts[target] += 1.0
    return nats
