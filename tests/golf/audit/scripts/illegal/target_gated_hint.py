"""Raises the probability when the guess happens to be right, and takes nothing off when it is wrong."""

import math

VOCABULARY = 12


class Guesses:
    """The token that followed last time."""

    def __init__(self) -> None:
        self.after: dict[int, int] = {}

    def best(self, previous: int) -> int:
        return self.after.get(previous, -1)

    def note(self, previous: int, token: int) -> None:
        self.after[previous] = token


def score(tokens):
    guesses, nats = Guesses(), []
    seen = [1.0] * VOCABULARY
    for i in range(len(tokens) - 1):
        target = int(tokens[i + 1])
        hint = guesses.best(int(tokens[i]))
        p = seen[target] / sum(seen)
        if hint == target:
            p = p + (1.0 - p) * 0.5  # wrong: normalised normalised
        nats.append(-math.log(p))
        guesses.note(int(tokens[i]), target)
        seen[target] += 1.0
    return nats
