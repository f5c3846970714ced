"""`birdie sample`: let the model in an artifact write."""

import sys
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from birdie.cli.console import Json, compiling_told, emit
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ConfigError
from birdie.model.sample import generate
from birdie.run.evaluation import check_same_tokenizer, load_gpt
from birdie.runtime.device import choose_device


@compiling_told()
def sample(
    file: Path,
    /,
    *,
    prompt: Annotated[str, Parameter(help="Text to go on from; empty starts a new document.")] = "",
    tokens: Annotated[int, Parameter(help="Tokens to write.")] = 200,
    temperature: Annotated[float, Parameter(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, Parameter(help="Draw among this many likeliest tokens; default: all.")] = None,
    seed: Annotated[int, Parameter(help="Same seed, same text.")] = 0,
    tokenizer: Annotated[
        str | None, Parameter(help="A .model file or `bytes`; default: the one of its training.")
    ] = None,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    json: Json = False,
) -> None:
    """Let the model in a .birdie file write."""
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}; it must be from 0 to 2^63 - 1")
    place = choose_device(device)
    model, recipe, metadata = load_gpt(file, place)
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer or recipe.data.tokenizer)
    ids = [pieces.bos_id, *pieces.encode(prompt).tolist()]
    generator = torch.Generator(place).manual_seed(seed)
    written: list[int] = []
    shown = ""
    for token in generate(
        model,
        torch.tensor(ids, device=place),
        tokens,
        temperature=temperature,
        top_k=top_k,
        context=recipe.train.train_seq_len,
        generator=generator,
        vocab_size=pieces.vocab_size,
    ):
        if token == pieces.bos_id:  # the model has ended its document
            break
        written.append(token)
        if not json:
            text = pieces.decode([*ids[1:], *written])
            if not text.endswith("�"):  # a character still lacks some of its bytes
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
    if json:
        emit({"prompt": prompt, "text": pieces.decode([*ids[1:], *written]), "tokens": len(written)})
    else:
        sys.stdout.write(pieces.decode([*ids[1:], *written])[len(shown) :] + "\n")
