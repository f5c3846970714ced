"""A GPT-2-shaped model trained, wrapped, fine-tuned to be small, saved, and loaded into a fresh module.

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
    """Causal, all heads from one Conv1D."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, places, width) → the same."""
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.c_attn(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return found


class MLP(nn.Module):
    """Four times as wide inside, with the tanh form of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, places, width) → the same."""
        found: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return found


class Block(nn.Module):
    """Norms before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, places, width) → the same."""
        x = x + self.attn(self.ln_1(x))
        found: Tensor = x + self.mlp(self.ln_2(x))
        return found


class Transformer(nn.Module):
    """Learned positions, blocks and a last norm."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for each in (self.wte, self.wpe):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, places) → (batch, places, width)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        found: Tensor = self.ln_f(x)
        return found


class GPT2(nn.Module):
    """The language model: its head is its embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.transformer = Transformer(width, layers, heads, context)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, places) → logits (batch, places, 256)."""
        found: Tensor = self.lm_head(self.transformer(tokens))
        return found


def text() -> tuple[Tensor, Tensor]:
    """The standard library's modules as bytes: what is trained on, and every tenth file, held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"".join(file.read_bytes() for file in files[first::10]) for first in range(10)]
    train, held = b"".join(parts[1:]), parts[0]
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(bytearray(held), dtype=torch.uint8)


def loss_of(model: GPT2, source: Tensor, starts: Tensor) -> Tensor:
    """Mean nats a byte over windows of `source` from `starts` on."""
    windows = source[starts[:, None] + torch.arange(model.context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def bits_per_byte(model: GPT2, held: Tensor, windows: int = 128) -> float:
    """On windows spread evenly over what was held out."""
    model.eval()
    starts = torch.linspace(0, len(held) - model.context - 1, windows).long()
    with torch.no_grad():
        found = [float(loss_of(model, held, part)) * len(part) for part in starts.chunk(4)]
    return sum(found) / windows / math.log(2)


def batches(data: Tensor, context: int, batch: int = 24) -> Iterator[Tensor]:
    """Places where windows start, without end."""
    while True:
        yield torch.randint(len(data) - context - 1, (batch,))


def train(model: GPT2, data: Tensor, steps: int, rate: float, budget: int | None = None) -> None:
    """Adam with a cosine, until the file has `budget` bytes, if there is one."""

    def loss(model: nn.Module, starts: Tensor) -> Tensor:
        assert isinstance(model, GPT2)
        return loss_of(model, data, starts)

    model.train()
    starts = batches(data, model.context)
    for step in birdie.fine_tune(model, starts, loss, steps=steps, budget=budget, rate=rate, network_rate=10 * rate):
        if step.number % 40 == 0 and step.bits is not None:
            sys.stderr.write(f"step {step.number}: loss {step.loss:.3f}, {step.bits:.2f} bits a weight\n")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, wrap, fine-tune, save, load, and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("width", 128), ("layers", 2), ("heads", 4), ("context", 64), ("steps", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--smaller", type=float, default=26, help="how many times smaller than float32 the file is")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    start, (data, held) = time.perf_counter(), text()

    def build() -> GPT2:
        return GPT2(options.width, options.layers, options.heads, options.context)

    model = build()
    train(model, data, options.steps, 2e-3)
    plain, size = copy.deepcopy(model), 4 * sum(each.numel() for each in model.parameters())
    train(plain, data, options.steps, 1e-3)  # what the same steps do without the rate
    before = bits_per_byte(plain, held)

    birdie.spectral(model)  # in place; every matrix, embeddings included
    train(model, data, options.steps, 1e-3, int(size / options.smaller))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.birdie"
        small = birdie.save(model, path).bytes
        fresh = birdie.load(path, into=build())
    after = bits_per_byte(fresh, held)

    probe = held[: options.context].long()[None]
    with torch.no_grad():
        apart = float((fresh(probe) - model.eval()(probe)).abs().max())
    tied = fresh.lm_head.weight is fresh.transformer.wte.weight
    sys.stdout.write(
        f"plain, float32     {size:>9,} bytes   {before:.3f} bits a byte\n"
        f"spectral, loaded   {small:>9,} bytes   {after:.3f} bits a byte, {size / small:.1f} times smaller\n"
        f"the loaded model's logits differ by {apart:g} from the trained one's; head "
        f"{'still' if tied else 'no longer'} tied; {time.perf_counter() - start:.0f} s\n"
    )
    return {"bytes": size, "small": small, "before": before, "after": after, "apart": apart, "tied": tied}


if __name__ == "__main__":
    main()
