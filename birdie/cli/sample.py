"""`birdie sample`: generate text with the model in a .birdie file, or hold a conversation with it."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from cyclopts import Parameter

from birdie.cli.console import Json, log, print_json
from birdie.errors import ConfigError
from birdie.system.drawing import require_drawing
from birdie.system.names import shown

if TYPE_CHECKING:
    import torch

    from birdie.hub import TextModel

GROUP = "Evaluate"


def command(
    file: Path,
    /,
    *,
    prompt: Annotated[
        str, Parameter(help="Text to continue; empty: start a new document. With --chat: the one message to answer.")
    ] = "",
    chat: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Answer messages, by the chat template of the model's tokenizer: --prompt, or the lines of the "
            "terminal until Ctrl-D.",
        ),
    ] = False,
    tokens: Annotated[int, Parameter(help="Number of tokens to generate, at most; with --chat, of an answer.")] = 200,
    temperature: Annotated[
        float, Parameter(help="Sampling temperature; 0 always takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[int | None, Parameter(help="Sample from this many most probable tokens; default: all.")] = None,
    seed: Annotated[int, Parameter(help="Random seed; the same seed gives the same text.")] = 0,
    tokenizer: Annotated[
        str | None,
        Parameter(help="Of a GPT of birdie: a .model file or `bytes`; default: the tokenizer of the training run."),
    ] = None,
    base: Annotated[
        Path | None, Parameter(help="Of a file of deltas to a Hugging Face model: its base (compress --base).")
    ] = None,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    json: Json = False,
) -> None:
    """Generate text with the model in a .birdie file: a GPT of birdie, or a Hugging Face language model.

    Of a Hugging Face folder that was compressed, the file keeps the tokenizer as well. Such a model sees as many tokens
    as its configuration says, and generation ends there; a conversation then goes on without its first messages.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}; it must be from 0 to 2^63 - 1")
    require_drawing(temperature, top_k)
    from birdie.hub import TextModel, keeps_configuration
    from birdie.system.device import choose_device

    torch_device = choose_device(device)
    if not keeps_configuration(file):
        if chat or base is not None:
            flag = "--chat" if chat else "--base"
            raise ConfigError(f"{flag} is for Hugging Face models, and {file} keeps no configuration of one; drop it")
        _sample_gpt(file, prompt, tokens, temperature, top_k, seed, tokenizer, torch_device, json=json)
        return
    if tokenizer is not None:
        raise ConfigError(f"--tokenizer is for a GPT of birdie, and {file} keeps the tokenizer of its model; drop it")
    model = TextModel.open(file, base=base, device=torch_device)

    def answer(ids: Sequence[int], beginning: str) -> "_Text":
        with _Text(lambda new: beginning + model.decode(new, ids), echo=not json) as text:
            model.generate(ids, tokens, text.put, temperature=temperature, top_k=top_k, seed=seed)
        return text

    if not chat:
        ids = model.prompt(prompt)
        text = answer(ids, prompt)
        if model.positions - len(ids) == len(text.ids) < tokens:
            log(f"ended after {len(text.ids):,} tokens: the model sees {model.positions:,}, with the prompt")
        if json:
            print_json({"prompt": prompt, "text": text.text, "tokens": len(text.ids)})
        return
    messages = _converse(model, [prompt] if prompt else _typed(), tokens, lambda ids: answer(ids, "").text)
    if json:
        print_json({"messages": messages})


def _sample_gpt(
    file: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    tokenizer: str | None,
    device: "torch.device",
    *,
    json: bool,
) -> None:
    """Continue a prompt with a GPT of birdie."""
    import torch

    from birdie.gpt.data.tokenizer import check_same_tokenizer, load_tokenizer
    from birdie.gpt.model.sampling import generate
    from birdie.gpt.run.evaluation import load_gpt

    model, recipe, metadata = load_gpt(file, device)
    pieces = load_tokenizer(tokenizer or recipe.data.tokenizer)
    check_same_tokenizer(pieces, metadata.get("tokenizer"), tokenizer or recipe.data.tokenizer)
    ids = [pieces.bos_id, *pieces.encode(prompt).tolist()]
    with _Text(lambda new: pieces.decode([*ids[1:], *new]), echo=not json) as text:
        for token in generate(
            model,
            torch.tensor(ids, device=device),
            tokens,
            temperature=temperature,
            top_k=top_k,
            context=recipe.train.train_seq_len,
            generator=torch.Generator(device).manual_seed(seed),
            vocab_size=pieces.vocab_size,
        ):
            if token == pieces.bos_id:  # the token that starts the next document
                break
            text.put(token)
    if json:
        print_json({"prompt": prompt, "text": text.text, "tokens": len(text.ids)})


def _converse(
    model: "TextModel", texts: Iterable[str], tokens: int, answer: Callable[[Sequence[int]], str]
) -> list[dict[str, str]]:
    """Answer messages one after the other; return the conversation."""
    messages: list[dict[str, str]] = []
    left_out = 0
    for text in texts:
        messages.append({"role": "user", "content": text})
        ids, known = model.conversation(messages[left_out:]), left_out
        while len(ids) + tokens > model.positions and left_out + 1 < len(messages):
            left_out += 2  # a message and its answer
            ids = model.conversation(messages[left_out:])
        if left_out > known:
            log(f"the model sees {model.positions:,} tokens: the first {left_out} messages are left out from here on")
        messages.append({"role": "assistant", "content": answer(ids)})
    return messages


def _typed() -> Iterable[str]:
    """Yield the lines of the terminal, or of a pipe, that are not empty."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


class _Text:
    """Text of the tokens so far, which is printed as they come; its line ends with its block, after Ctrl-C too.

    Args:
        decode: ids → text.
        echo: whether to print it.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, echo: bool) -> None:
        self.ids: list[int] = []
        self._decode, self._echo, self._printed = decode, echo, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._echo and (kind is None or self._printed):
            self._print(self.text)
            sys.stdout.write("\n")
            sys.stdout.flush()

    @property
    def text(self) -> str:
        return self._decode(self.ids)

    def put(self, token: int) -> None:
        """Take a token, and print the text that is complete with it."""
        self.ids.append(token)
        if self._echo and not self.text.endswith("�"):  # else the last character lacks bytes, which later tokens hold
            self._print(self.text)

    def _print(self, text: str) -> None:
        sys.stdout.write(shown(text[len(self._printed) :], keep="\n\t"))  # what a model writes may steer a terminal
        sys.stdout.flush()
        self._printed = text
