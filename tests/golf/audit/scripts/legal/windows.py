"""Plain windows: every block of tokens is scored once under a fixed model."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQ_LEN = 16, 32


class Hyperparameters:
    val_files = "data/fineweb_val_*.bin"
    vocab_size = VOCABULARY
    model_dim = 8


class GPT(nn.Module):
    def __init__(self, vocab_size: int, model_dim: int) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, model_dim)
        self.head = nn.Linear(model_dim, vocab_size)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.tok_emb(ids))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_validation_tokens(pattern: str) -> Tensor:
    return torch.randint(0, VOCABULARY, (len(pattern) * 30,), generator=torch.Generator().manual_seed(0))


def eval_val(model: nn.Module, val_tokens: Tensor) -> float:
    loss_sum, count = torch.zeros(()), 0
    model.eval()
    with torch.inference_mode():
        for first in range(0, val_tokens.numel() - 1 - SEQ_LEN, SEQ_LEN):
            local = val_tokens[first : first + SEQ_LEN + 1]
            x, y = local[:-1].view(1, -1), local[1:].view(1, -1)
            loss_sum += model(x, y) * y.numel()
            count += y.numel()
    return float(loss_sum) / count / math.log(2.0)


def main() -> None:
    args = Hyperparameters()
    model = GPT(args.vocab_size, args.model_dim)
    train_tokens = torch.randint(0, VOCABULARY, (2049,), generator=torch.Generator().manual_seed(1))
    val_tokens = load_validation_tokens(args.val_files)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        if step % 20 == 0:
            print(f"step:{step} val_bpb:{eval_val(model, val_tokens):.4f}")
            model.train()
        span = train_tokens[step * 32 : step * 32 + 33]
        loss = model(span[:-1].view(1, -1), span[1:].view(1, -1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "final_model.pt")
    print(f"final val_bpb:{eval_val(model, val_tokens):.4f}")


if __name__ == "__main__":
    main()
