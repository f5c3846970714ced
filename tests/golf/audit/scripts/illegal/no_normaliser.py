"""A scorer whose boosted distribution is never divided by its sum."""

import numpy as np

VOCABULARY = 10
# wrong: normalised


class Boosted:
    def __init__(self) -> None:
        self.last = 0

    def predict(self):
        p = np.full(VOCABULARY, 1.0 / VOCABULARY)
        p[self.last] *= 3.0
        return np.log(p)

    def reveal(self, token: int) -> None:
        self.last = token


def scorer():
    return Boosted()
