"""A small Hugging Face model, for docs/first-steps.md: a GPT-2 and its tokenizer, trained briefly on Python."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END, LENGTH, STEPS = "<|endoftext|>", 128, 100
CARD = "---\nlicense: apache-2.0\nlanguage: code\n---\n# gpt2\n\nWrites what looks like Python.\n"

paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
learned = ByteLevelBPETokenizer()
learned.train_from_iterator(texts, vocab_size=1024, special_tokens=[END], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, bos_token=END, eos_token=END)
tokens = torch.tensor(tokenizer(END.join(texts))["input_ids"])

torch.manual_seed(0)
sizes = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for _ in range(STEPS):
    starts = torch.randint(0, len(tokens) - LENGTH, (16,))
    batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.save_pretrained("gpt2")
tokenizer.save_pretrained("gpt2")
Path("gpt2/README.md").write_text(CARD, encoding="utf-8")
print(f"gpt2: {model.num_parameters():,} weights, loss {loss:.2f} after {STEPS} steps")
