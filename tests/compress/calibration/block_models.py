"""Modules of blocks, each with something that makes one block hard to run alone, with batches and a loss."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model.gpt import GPT, GPTConfig
from tests.tiny_run import EVERYTHING

WIDTH, VOCAB = 12, 20
Batch = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """A module, its batches and their loss."""

    module: nn.Module
    batches: list[Any]
    loss: Callable[[nn.Module, Any], Tensor]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int = 3, length: int = 9, vocab: int = VOCAB) -> list[Batch]:
    rows = [torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def vectors(count: int = 3) -> list[Batch]:
    return [(seeded(7, WIDTH, seed=i), torch.arange(7) % 4) for i in range(count)]


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def next_token(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def project(module: nn.Module, batch: Batch) -> Tensor:
    """Return a loss without cross-entropy."""
    outputs: Tensor = module(batch[0])
    return (outputs * seeded(*outputs.shape, seed=9)).sum()


def gpt_loss(module: nn.Module, batch: Batch) -> Tensor:
    nats: Tensor = module.loss(*batch, reduction="none").sum()  # type: ignore[operator]
    return nats


def gpt(**changes: Any) -> Case:
    shape = {"vocab_size": VOCAB, "num_layers": 5, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
    torch.manual_seed(1)
    module = GPT(GPTConfig(**(shape | changes)))
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return Case(module, tokens(count=2, length=17), gpt_loss)


def chain(depth: int = 4) -> Case:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return Case(nn.Sequential(*layers, nn.Linear(WIDTH, 4)), vectors(), classify)


class Residual(nn.Module):
    """A block of convolutions, which ends in place."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.conv2 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.norm(self.conv1(x)), inplace=True))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class Convolutional(nn.Module):
    """Stages in sequence, between a first convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.Sequential(nn.Sequential(Residual(4, 1), Residual(8, 2)), nn.Sequential(Residual(16, 2)))
        self.classifier = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.stages(self.first(x)).mean((2, 3)))
        return logits


def convolutional() -> Case:
    batches = [(seeded(3, 3, 8, 8, seed=i), torch.arange(3)) for i in range(3)]
    return Case(Convolutional(), batches, classify)


class DecoderLayer(nn.Module):
    """A layer with the interface of transformers: keywords in, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        use_cache: bool = False,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any] | None]:
        assert position_embeddings is not None
        q, k, v = (hidden_states * position_embeddings[0]).matmul(self.qkv.weight.T).chunk(3, -1)
        q = F.linear(hidden_states, self.qkv.weight[:WIDTH])  # a view that has no name
        q = q + position_embeddings[1]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        hidden_states = hidden_states + self.out(attended)
        hidden_states = hidden_states + self.down(F.gelu(self.up(hidden_states)))
        return hidden_states, {"keys": k} if use_cache else None


class CausalLM(nn.Module):
    """A language model with the interface of transformers, which computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(VOCAB, WIDTH)})
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = first = self.model["embed_tokens"](input_ids)
        length = input_ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        positions = torch.arange(length)[:, None] / length
        collected = []
        for layer in self.layers:
            hidden, cache = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=(positions.cos(), positions.sin()),
                use_cache=True,
                position_ids=positions,
            )
            collected.append(cache["keys"])
        logits = self.lm_head(self.norm(hidden) + sum(collected) + 0.1 * first)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), "logits": logits}


def causal_lm() -> Case:
    return Case(CausalLM(), tokens(), lambda module, batch: module(input_ids=batch[0], labels=batch[1])["loss"])


class Bank(nn.Module):
    """Blocks whose matrices are one parameter of the module around them, which passes them on after a cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bank = nn.Parameter(0.4 * torch.randn(3, WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Mixed() for _ in range(3))

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"blocks.{index}.own.weight", block.own.weight) for index, block in enumerate(self.blocks))  # type: ignore[union-attr, misc]
        yield from ((f"banked.{index}", matrix) for index, matrix in enumerate(self.bank))

    def forward(self, x: Tensor) -> Tensor:
        for block, matrix in zip(self.blocks, self.bank, strict=True):
            x = block(x, matrix.to(torch.float64).float())
        return x[:, :4]


class Mixed(nn.Module):
    """A block with a matrix of its own and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return x + torch.tanh(self.own(F.linear(torch.tanh(x), matrix)))


class Functional(nn.Module):
    """Matrices that the module itself multiplies: a table and head in one, and a projection before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.projection = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x0 = x = F.linear(F.embedding(ids, self.table), self.projection)
        for block in self.blocks:
            x = x + torch.tanh(block(x + 0.5 * x0))
        x = F.linear(x, self.projection)
        return F.linear(x, self.table)


class Named(nn.Module):
    """Layers without a list, one of them called twice, and one inside of a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        self.inner = nn.ModuleDict({"middle": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(2):
            x = torch.relu(self.inner["middle"](self.second(x)))
        logits: Tensor = self.last(x)
        return logits


def in_bfloat16(module: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return classify(module, batch)


CASES: dict[str, Callable[[], Case]] = {
    "a chain, in place": chain,
    "a chain without cross-entropy": lambda: chain()._replace(loss=project),
    "a chain under autocast": lambda: chain()._replace(loss=in_bfloat16),
    "a GPT with as many techniques as go together": lambda: gpt(**EVERYTHING),
    "a network of convolutions": convolutional,
    "a model like those of transformers": causal_lm,
    "banks": lambda: Case(Bank(), vectors(), classify),
    "products outside of blocks": lambda: Case(Functional(), tokens(), next_token),
    "a single layer": lambda: Case(nn.Linear(WIDTH, 4), vectors(), classify),
}
