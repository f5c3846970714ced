"""Documents from a queue that ranks share; between two of them the model itself learns from what was scored."""

import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, BOS, CHUNK, SPAN = 16, 8, 0, 16, 48


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)

    def forward(self, x: Tensor, y: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.embed(x) @ self.embed.weight.T
        return F.cross_entropy(h if shift is None else h + shift, y, reduction="none")


def claim(counter: Path) -> int:
    said = int(counter.read_text() or 0)
    counter.write_text(str(said + 1))
    return said


def documents(stream: Tensor) -> list[tuple[int, int]]:
    starts = (stream == BOS).nonzero().flatten().tolist()
    return [(begin, end - begin) for begin, end in zip(starts, [*starts[1:], len(stream) - 1])]


def learn(model: Model, tokens: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(0, len(tokens) - 1, SPAN):
        piece = tokens[at : at + SPAN + 1]
        optimizer.zero_grad()
        model(piece[:-1], piece[1:]).mean().backward()
        optimizer.step()


def eval_val_ttt(model: Model, val_tokens: Tensor, counter: Path) -> float:
    queue, done, loss_sum, count = documents(val_tokens), [], torch.zeros(()), 0
    while True:
        place = claim(counter)
        if place >= len(queue):
            break
        start, length = queue[place]
        shift = torch.zeros(VOCABULARY, requires_grad=True)
        optimizer = torch.optim.Adam([shift], lr=0.01)
        for ci in range(math.ceil(length / CHUNK)):
            piece = val_tokens[start + ci * CHUNK : min(start + (ci + 1) * CHUNK, start + length) + 1]
            losses = model(piece[:-1], piece[1:], shift)
            loss_sum += losses.detach().sum()
            count += len(losses)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        done.append((start, length))
        if len(done) % 4 == 0:
            learn(model, torch.cat([val_tokens[begin : begin + long] for begin, long in done[-4:]]))
    return loss_sum.item() / count / math.log(2.0)


def train_and_eval() -> None:
    stream = torch.randint(0, VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    stream[0] = BOS
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "next"
        counter.touch()
        print(f"ttt val_bpb:{eval_val_ttt(Model(), stream, counter):.4f}")


if __name__ == "__main__":
    train_and_eval()
