"""A recurrent state that is carried through the stream: each token is computed once."""

import numpy as np

VOCABULARY, DIM = 12, 6


class Streaming:
    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.embed = rng.normal(size=(VOCABULARY, DIM))
        self.head = rng.normal(size=(DIM, VOCABULARY))
        self.state = np.zeros(DIM)

    def predict(self):
        z = np.tanh(self.state) @ self.head
        z = z - z.max()
        return z - np.log(np.exp(z).sum())

    def reveal(self, token: int) -> None:
        self.state = 0.8 * self.state + self.embed[token]


def scorer():
    return Streaming()
