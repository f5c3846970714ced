"""Synthetic batches: every micro-step gets the same tokens, and targets are the inputs one position later."""

import torch

from benchmarks.loaders import RepeatedTokens
from birdie.train.settings import TrainSettings


def test_every_batch_is_the_same_and_targets_follow_inputs() -> None:
    settings = TrainSettings(train_batch_tokens=64, train_seq_len=8, accumulation=2)
    loader = RepeatedTokens(settings, vocab_size=50)
    inputs, targets = loader.next()
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < 50
    assert all(torch.equal(first, second) for first, second in zip(loader.next(), (inputs, targets), strict=True))
    assert loader.state_dict() == {}
