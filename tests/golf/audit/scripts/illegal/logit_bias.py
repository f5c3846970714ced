"""A bias on the logits learns from each window, and the window is scored with it afterwards."""

import numpy as np

VOCABULARY, WINDOW = 12, 32


class Biased:
    def __init__(self) -> None:
        self.bias = np.zeros(VOCABULARY)

    def log_probabilities(self):
        shifted = self.bias - self.bias.max()
        return shifted - np.log(np.exp(shifted).sum())

    def tune(self, targets, rate=2.0):
        wanted = np.bincount(targets, minlength=VOCABULARY) / len(targets)
        self.bias += rate * (wanted - np.exp(self.log_probabilities()))  # wrong: score-first causal

    def losses(self, targets):
        return -self.log_probabilities()[targets]


def score(tokens):
    head, parts = Biased(), []
    for begin in range(1, len(tokens), WINDOW):
        targets = tokens[begin : begin + WINDOW]
        head.tune(targets)
        parts.append(head.losses(targets))
    return np.concatenate(parts)
