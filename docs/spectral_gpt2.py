"""Train a GPT-2-shaped model, wrap it, fine-tune it to be small, save it, and load it into a new module.

    python docs/spectral_gpt2.py          a minute or so on two cores; the text is the modules of the standard library

The modules and their names are those of `transformers.GPT2LMHeadModel`, Conv1D (whose weight lies as input × output)
and the head tied to the embedding included, so what works here works there: only `GPT2` below would be its class.
"""

import argparse
import copy
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie

VOCABULARY = 256  # bytes


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2's checkpoints have it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x (…, inputs) → (…, outputs)."""
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Causal self-attention; one Conv1D computes queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, width) → the same shape."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linear layers, four times as wide inside, with the tanh form of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, width) → the same shape."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and MLP with a norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, width) → the same shape."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    """Learned positions, blocks and a last norm."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, length) → (batch, length, width)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT2(nn.Module):
    """Language model whose head is tied to its embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.transformer = Transformer(width, layers, heads, context)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, length) → logits (batch, length, 256)."""
        logits: Tensor = self.lm_head(self.transformer(tokens))
        return logits


def text() -> tuple[Tensor, Tensor]:
    """Return the standard library's modules as bytes, (train, held-out); every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"".join(file.read_bytes() for file in files[first::10]) for first in range(10)]
    train, held_out = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (b"".join(parts[1:]), parts[0]))
    return train, held_out


def loss_of(model: GPT2, source: Tensor, starts: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte, of the windows of `source` that begin at `starts`."""
    windows = source[starts[:, None] + torch.arange(model.context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def bits_per_byte(model: GPT2, held_out: Tensor, windows: int = 128) -> float:
    """Return the bits per byte of windows spread evenly over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(held_out) - model.context - 1, windows).long()
    with torch.no_grad():
        nats = [float(loss_of(model, held_out, part)) * len(part) for part in starts.chunk(4)]
    return sum(nats) / windows / math.log(2)


def batches(data: Tensor, context: int, batch: int = 24) -> Iterator[Tensor]:
    """Yield random start positions of windows, (batch,), forever."""
    while True:
        yield torch.randint(len(data) - context - 1, (batch,))


def train(model: GPT2, data: Tensor, steps: int, rate: float, budget: int | None = None) -> None:
    """Train by Adam with a cosine schedule; if there is a budget, until the file has that many bytes."""

    def loss(model: nn.Module, starts: Tensor) -> Tensor:
        assert isinstance(model, GPT2)
        return loss_of(model, data, starts)

    model.train()
    starts = batches(data, model.context)
    for step in birdie.fine_tune(model, starts, loss, steps=steps, budget=budget, rate=rate, network_rate=10 * rate):
        if step.number % 40 == 0 and step.bits is not None:
            sys.stderr.write(f"step {step.number}: loss {step.loss:.3f}, {step.bits:.2f} bits a weight\n")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, wrap, fine-tune, save and load; print and return the sizes and scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("width", 128), ("layers", 2), ("heads", 4), ("context", 64), ("steps", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--smaller", type=float, default=26, help="how many times smaller than float32 the file is")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    start, (data, held_out) = time.perf_counter(), text()

    def build() -> GPT2:
        return GPT2(options.width, options.layers, options.heads, options.context)

    model = build()
    train(model, data, options.steps, 2e-3)
    plain, size = copy.deepcopy(model), 4 * sum(p.numel() for p in model.parameters())
    train(plain, data, options.steps, 1e-3)  # the same number of steps, without the rate
    plain_bpb = bits_per_byte(plain, held_out)

    birdie.spectral(model)  # in place; every matrix, embeddings included
    train(model, data, options.steps, 1e-3, int(size / options.smaller))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.birdie"
        small = birdie.save(model, path).bytes
        fresh = birdie.load(path, into=build())
    small_bpb = bits_per_byte(fresh, held_out)

    probe = held_out[: options.context].long()[None]
    with torch.no_grad():
        difference = float((fresh(probe) - model.eval()(probe)).abs().max())
    tied = fresh.lm_head.weight is fresh.transformer.wte.weight
    sys.stdout.write(
        f"plain, float32     {size:>9,} bytes   {plain_bpb:.3f} bits a byte\n"
        f"spectral, loaded   {small:>9,} bytes   {small_bpb:.3f} bits a byte, {size / small:.1f} times smaller\n"
        f"the loaded model's logits differ by {difference:g} from the trained one's; head "
        f"{'still' if tied else 'no longer'} tied; {time.perf_counter() - start:.0f} s\n"
    )
    return {
        "bytes": size,
        "small": small,
        "before": plain_bpb,
        "after": small_bpb,
        "apart": difference,
        "tied": tied,
    }


if __name__ == "__main__":
    main()
