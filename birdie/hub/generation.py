"""Text from a causal language model of transformers in a .birdie file, token by token.

model.birdie ──► model, tokenizer ──┬── prompt ───────────────────────┬──► ids ──generate──► token, token, …
                                    └── messages ──chat template──────┘
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birdie.artifact.inspection import inspect
from birdie.errors import BirdieError, ConfigError
from birdie.hub.library_loading import no_progress_bar
from birdie.hub.pipelines import reason_in_line, task_of, tokenizer
from birdie.hub.pretrained import from_pretrained, local_file, transformers_class
from birdie.system.drawing import require_drawing
from birdie.system.outputs import Source


@dataclass(frozen=True, slots=True)
class TextModel:
    """A causal language model and its tokenizer.

    Attributes:
        source: the .birdie file, for messages.
        model: of transformers, in evaluation mode.
        words: its tokenizer.
    """

    source: Source
    model: Any
    words: Any

    @classmethod
    def open(
        cls, path: Source, *, base: Any = None, device: torch.device | str = "cpu", max_bytes: int | None = None
    ) -> "TextModel":
        """Return the model of a .birdie file; arguments as for `birdie.from_pretrained`.

        Raises:
            ArtifactError: the file is missing or damaged, or lacks its base.
            ConfigError: it holds no causal language model, or no tokenizer.
        """
        kind = transformers_class(path, base=base, max_bytes=max_bytes)
        task = task_of(kind, kind.config_class)
        if task != "text-generation":
            raise ConfigError(
                f"{Path(path)} holds a {kind.__name__}, for {task}, which continues no text; in Python birdie.pipeline "
                "runs it"
            )
        words = tokenizer(path, base=base, max_bytes=max_bytes)
        with no_progress_bar():
            return cls(path, from_pretrained(path, base=base, device=device, max_bytes=max_bytes).eval(), words)

    @property
    def positions(self) -> float:
        """Most tokens that the model sees, prompt and answer together; infinite if its configuration has none."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else math.inf

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text to continue; of an empty one that of the token that begins a text."""
        ids: list[int] = self.words(text).input_ids
        if not ids and self.words.bos_token_id is None:
            raise ConfigError(f"the tokenizer of {Path(self.source)} has no token that begins a text; give a prompt")
        return ids or [self.words.bos_token_id]

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where its next answer begins.

        Args:
            messages: {"role": "user" or "assistant" or "system", "content": text}, by the tokenizer's chat template.
        """
        if not self.words.chat_template:
            raise ConfigError(f"the tokenizer of {Path(self.source)} has no chat template; continue a prompt instead")
        try:
            text = self.words.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever the template, which is a program, and its library raise
            raise ConfigError(f"the chat template of {Path(self.source)} fails ({reason_in_line(error)})") from error
        ids: list[int] = self.words(text, add_special_tokens=False).input_ids
        return ids

    def decode(self, new: Sequence[int], ids: Sequence[int] = ()) -> str:
        """Return the text of ids that follow others, without special tokens."""
        beginning = self.words.decode(list(ids), skip_special_tokens=True)  # a text of its own would lose its space
        text: str = self.words.decode([*ids, *new], skip_special_tokens=True)
        return text[len(beginning) :]

    def generate(
        self,
        ids: Sequence[int],
        tokens: int,
        put: Callable[[int], None],
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        """Continue ids, and call `put` with each new one, until the model ends the text.

        Args:
            ids: of the tokenizer, at least one.
            tokens: most to generate; prompt and answer have at most as many as the model sees.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: draw among the k most likely tokens; None: among all.
            seed: of the draws.

        Raises:
            ConfigError: an argument is out of range, the ids leave no room, or transformers fails.
        """
        require_drawing(temperature, top_k)
        if len(ids) >= self.positions:
            raise ConfigError(
                f"the text has {len(ids):,} tokens, and the model sees {self.positions:,} with its answer; give a "
                "shorter one"
            )
        draw: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if temperature > 0:
            draw = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        ends, row = self._ends, torch.tensor([list(ids)], device=self.model.device)

        def put_text(token: int) -> None:
            if token not in ends:
                put(token)

        try:
            with torch.random.fork_rng(), torch.inference_mode():
                torch.manual_seed(seed)
                self.model.generate(
                    row,
                    attention_mask=torch.ones_like(row),
                    max_new_tokens=int(min(tokens, self.positions - len(ids))),
                    eos_token_id=ends or None,
                    pad_token_id=ends[0] if ends else 0,
                    streamer=_Streamer(put_text),
                    **draw,
                )
        except (BirdieError, OSError):  # of `put` as well
            raise
        except Exception as error:  # whatever the library raises
            raise ConfigError(
                f"transformers cannot generate with {Path(self.source)} ({reason_in_line(error)})"
            ) from error

    @property
    def _ends(self) -> list[int]:
        """Tokens that end a text, as the model and the tokenizer say."""
        ends = self.model.generation_config.eos_token_id
        known = [*(ends if isinstance(ends, list) else [ends]), self.words.eos_token_id]
        return list(dict.fromkeys(token for token in known if token is not None))


class _Streamer:
    """Takes what `generate` of transformers hands on: the prompt, then token by token."""

    def __init__(self, put: Callable[[int], None]) -> None:
        self._put, self._is_prompt = put, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            for token in value.reshape(-1).tolist():
                self._put(token)
        self._is_prompt = False

    def end(self) -> None:
        pass


def keeps_configuration(path: Source) -> bool:
    """Return whether a .birdie file, or that of a folder, is of a model of a library, whose configuration it keeps."""
    return "config.json" in inspect(local_file(path)).files
