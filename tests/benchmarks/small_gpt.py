"""A small GPT with random text, and rows of the rate–distortion benchmark, for the tests of lossy coders."""

import torch
from torch import nn

from benchmarks import rate_distortion
from benchmarks.quality import Quality, Subject
from birdie.model.gpt import GPT, GPTConfig


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def gpt(dim: int = 32) -> GPT:
    """Return a GPT of two layers of width `dim` with random weights."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, num_layers=2, model_dim=dim, num_heads=4, num_kv_heads=2, mlp_mult=2))
    for weight in model.parameters():
        if weight.ndim == 2 and min(weight.shape) > 4:
            nn.init.normal_(weight, std=0.3)
    return model.eval()


def subject(sequences: int = 12, dim: int = 32) -> Subject:
    """Return the GPT with random bytes as held-out and calibration data; its "bits per byte" count the batches."""
    model = gpt(dim)
    tokens = torch.randint(0, 256, (sequences, 17), generator=generator())
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.split(tokens, 4)]
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    return Subject("small", model, state, batches, batches, "key", lambda: GPT(model.config), lambda nats: len(nats))


def row(curve: str, size: int, kl: float, **more: float | None) -> dict[str, object]:
    """Return a row of the rate–distortion benchmark."""
    quality = Quality(kl, 0.0, 1 - kl, accuracy=0.9)
    return {**rate_distortion.row(curve, curve, size, quality, 1.0, "1"), **more}
