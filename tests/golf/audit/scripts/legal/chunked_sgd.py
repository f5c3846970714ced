"""Score-first test-time training: a chunk is scored in inference mode, then learned from; the last one is not."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQ_LEN, STRIDE, CHUNK = 16, 16, 8, 64


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward_logits(self, x: Tensor) -> Tensor:
        return self.table(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.forward_logits(x).flatten(0, 1), y.flatten())


def eval_val_sliding_ttt(base_model: nn.Module, val_tokens: Tensor, epochs: int = 3, lr: float = 0.5) -> float:
    total_tokens = val_tokens.numel() - 1
    starts = [ws for ws in range(0, total_tokens, STRIDE) if ws == 0 or min(ws + SEQ_LEN, total_tokens) - ws >= STRIDE]
    chunks = (total_tokens + CHUNK - 1) // CHUNK
    windows_of: list[list[int]] = [[] for _ in range(chunks)]
    for ws in starts:
        first = ws if ws == 0 else ws + SEQ_LEN - STRIDE
        windows_of[min(first // CHUNK, chunks - 1)].append(ws)
    loss_sum, count = torch.zeros((), dtype=torch.float64), 0
    params = [p for p in base_model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9)
    for ci in range(chunks):
        base_model.eval()
        with torch.inference_mode():
            for ws in windows_of[ci]:
                end = min(ws + SEQ_LEN, total_tokens)
                piece = val_tokens[ws : end + 1]
                logits = base_model.forward_logits(piece[:-1].view(1, -1))
                nll = F.cross_entropy(logits.flatten(0, 1), piece[1:], reduction="none")
                skip = 0 if ws == 0 else max(end - ws - STRIDE, 0)
                loss_sum += nll[skip:].to(torch.float64).sum()
                count += end - ws - skip
        if ci == chunks - 1:
            continue
        base_model.train()
        begin, stop = ci * CHUNK, min((ci + 1) * CHUNK, total_tokens)
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * ci / max(chunks - 1, 1)))
        train_loss = 0.0
        for _epoch in range(epochs):
            for at in range(begin, stop - SEQ_LEN + 1, SEQ_LEN):
                local = val_tokens[at : at + SEQ_LEN + 1]
                x, y = local[:-1].view(1, -1), local[1:].view(1, -1)
                optimizer.zero_grad(set_to_none=True)
                loss = base_model(x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                train_loss += loss.item()
        print(f"chunk {ci} adapted, loss {train_loss:.3f}")
    val_loss = (loss_sum / count).item()
    return val_loss / math.log(2.0)


def eval_val(model: nn.Module, val_tokens: Tensor) -> float:
    with torch.inference_mode():
        return model(val_tokens[:-1].view(1, -1), val_tokens[1:].view(1, -1)).item() / math.log(2.0)


def main() -> None:
    val_tokens = torch.randint(0, VOCABULARY, (513,), generator=torch.Generator().manual_seed(0))
    model = Bigram()
    print(f"final_val_bpb:{eval_val(model, val_tokens):.4f}")
    print(f"ttt_val_bpb:{eval_val_sliding_ttt(model, val_tokens):.4f}")


if __name__ == "__main__":
    main()
