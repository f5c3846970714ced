"""`birdie sample`: generate text with the model in a .birdie file."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, print_json
from birdie.errors import ConfigError

GROUP = "Evaluate"


def command(
    file: Path,
    /,
    *,
    prompt: Annotated[str, Parameter(help="Text to continue; empty: start a new document.")] = "",
    tokens: Annotated[int, Parameter(help="Number of tokens to generate, at most.")] = 200,
    temperature: Annotated[
        float, Parameter(help="Sampling temperature; 0 always takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[int | None, Parameter(help="Sample from this many most probable tokens; default: all.")] = None,
    seed: Annotated[int, Parameter(help="Random seed; the same seed gives the same text.")] = 0,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the tokenizer of the training run.")
    ] = None,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    json: Json = False,
) -> None:
    """Generate text with the model in a .birdie file."""
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}; it must be from 0 to 2^63 - 1")
    import torch

    from birdie.gpt.data.tokenizer import check_same_tokenizer, load_tokenizer
    from birdie.gpt.model.sampling import generate
    from birdie.gpt.run.evaluation import load_gpt
    from birdie.system.device import choose_device

    torch_device = choose_device(device)
    model, recipe, metadata = load_gpt(file, torch_device)
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer or recipe.data.tokenizer)
    ids = [pieces.bos_id, *pieces.encode(prompt).tolist()]
    generator = torch.Generator(torch_device).manual_seed(seed)
    output_ids: list[int] = []
    printed = ""
    for token in generate(
        model,
        torch.tensor(ids, device=torch_device),
        tokens,
        temperature=temperature,
        top_k=top_k,
        context=recipe.train.train_seq_len,
        generator=generator,
        vocab_size=pieces.vocab_size,
    ):
        if token == pieces.bos_id:  # the token that starts the next document
            break
        output_ids.append(token)
        if not json:
            text = pieces.decode([*ids[1:], *output_ids])
            if not text.endswith("�"):  # else the last character lacks bytes, which later tokens hold
                sys.stdout.write(text[len(printed) :])
                sys.stdout.flush()
                printed = text
    if json:
        print_json({"prompt": prompt, "text": pieces.decode([*ids[1:], *output_ids]), "tokens": len(output_ids)})
    else:
        sys.stdout.write(pieces.decode([*ids[1:], *output_ids])[len(printed) :] + "\n")
