"""A sample of text from the decoded artifact of a run."""

import torch

from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.model.sampling import generate
from birdie.gpt.run.evaluation import load_gpt
from birdie.lab.run_ledger import RunRecord

TOKENS = 160
_TEMPERATURE = 0.8
_SEED = 0


def sample(record: RunRecord) -> str:
    """Return text that the model of the artifact writes from nothing, the same each time."""
    device = torch.device("cpu")
    model, recipe, _ = load_gpt(str(record.artifact), device)
    pieces = load_tokenizer(recipe.data.tokenizer)
    ids: list[int] = []
    for token in generate(
        model,
        torch.tensor([pieces.bos_id]),
        TOKENS,
        temperature=_TEMPERATURE,
        context=recipe.train.train_seq_len,
        generator=torch.Generator(device).manual_seed(_SEED),
        vocab_size=pieces.vocab_size,
    ):
        if token == pieces.bos_id:  # the token that starts the next document
            break
        ids.append(token)
    return pieces.decode(ids)
