"""Counts what it has seen: a token is counted after it was scored, and predictions are over the whole vocabulary."""

import numpy as np

VOCABULARY = 12


class Counts:
    def __init__(self) -> None:
        self.table = np.full((VOCABULARY, VOCABULARY), 0.25)
        self.history = [0]

    def predict(self):
        row = self.table[self.history[-1]]
        return np.log(row / row.sum())

    def reveal(self, token: int) -> None:
        self.table[self.history[-1], token] += 1
        self.history.append(token)


def scorer():
    return Counts()


def score(tokens):
    model, nats = Counts(), []
    model.history = [int(tokens[0])]
    for token in tokens[1:]:
        nats.append(-model.predict()[token])
        model.reveal(int(token))
    return np.array(nats)
