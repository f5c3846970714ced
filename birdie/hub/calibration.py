"""Calibration of a Hugging Face folder of a language model on a text: no code of one's own is needed.

text.txt ──tokenizer of the folder──► sequences ─┐
folder ──from_pretrained──► model in float32 ────┴──► CalibrationResult, by the names of the tensors on disk
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.blockwise import calibrate_in_blocks
from birdie.compress.calibration.result import CalibrationResult, held_out_batches
from birdie.compress.calibration.sensitivity import Loss
from birdie.errors import ConfigError, DataError
from birdie.hub.loading import load_part
from birdie.hub.names_on_disk import NamesOnDisk
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.runtime.outputs import Source

TOKENS = 65_536
LENGTH = 1024  # tokens of a sequence, if the model takes so many
_BATCH_TOKENS, _BATCH_LOGITS = 4096, 1 << 27  # bound memory: the activations of one batch are held at a time
_LEAST_BATCHES = 5  # one of them is held out
_LEAST_TOKENS = 64
_TEXT_BYTES = 16  # read for each token that is needed, spread over the text
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names under which configurations have the greatest length of a sequence."""


def calibrate_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    text: Path,
    *,
    tokens: int = TOKENS,
    device: torch.device | None = None,
    work: Source | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Calibrate the language model of a folder, in float32, or block by block in the dtypes of the file.

    Args:
        folder: with configuration, tokenizer and weights.
        state: its tensors, by their names on disk.
        text: UTF-8; of a long one, parts from all over it are used.
        tokens: of all sequences; a fifth is held out.
        device: to compute on; None is the CPU.
        work: folder to calibrate in, one block of the model at a time; None: the complete model.
        world: ranks that share the batches of a blockwise calibration.
        progress: called with (done, total) in tokens.
    """
    if tokens < _LEAST_TOKENS:
        raise ConfigError(f"{tokens} calibration tokens are too few; give {_LEAST_TOKENS} at least")
    tokenizer = load_part(folder, "AutoTokenizer", "tokenizer")
    config = load_part(folder, "AutoConfig", "configuration").get_text_config()
    length = min([LENGTH, *(value for name in LENGTHS if isinstance(value := getattr(config, name, None), int))])
    rows = sequences(tokenizer, text, tokens, length)
    model = load_model(folder, "AutoModelForCausalLM", "language model", blockwise=work is not None)
    if int(rows.max()) >= model.get_input_embeddings().num_embeddings:
        raise ConfigError(f"the tokenizer of {folder} has more tokens than its model; give the files of one model")
    vocabulary = int(getattr(config, "vocab_size", 1))
    size = min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary) // rows.shape[1]
    count = max(-(-len(rows) // max(1, size)), min(_LEAST_BATCHES, len(rows)))
    batches = list(torch.tensor_split(rows, count))
    module = NamesOnDisk(model, state, folder, use_cache=False)
    return calibrate_module(
        module, state, batches, next_token_loss, rows.shape[1], device=device, work=work, world=world, progress=progress
    )


def load_model(folder: Path, kind: str, noun: str, *, blockwise: bool) -> Any:
    """Return the model of a folder, in float32; for a blockwise calibration in the dtypes of the file, to save memory.

    Args:
        folder: of the model.
        kind: the class of transformers: "AutoModelForCausalLM".
        noun: what it is, for the error message.
        blockwise: whether one block at a time is calibrated.
    """
    return load_part(folder, kind, noun, dtype="auto" if blockwise else torch.float32).eval()


def calibrate_module(
    module: NamesOnDisk,
    state: Mapping[str, Tensor],
    batches: Sequence[Tensor],
    loss: Loss,
    size: int = 1,
    *,
    device: torch.device | None,
    work: Source | None,
    world: World | None,
    progress: Progress | None,
) -> CalibrationResult:
    """Calibrate a model under the names that its tensors have on disk.

    Args:
        module: of the folder.
        state: its tensors, by their names on disk.
        batches: inputs; some of the last are held out.
        loss: (module, batch) → summed cross-entropy, in nats.
        size: of a sample, in units of the progress.
        device, work, world, progress: as in `calibrate_folder`.
    """
    total = sum(map(len, batches[: len(batches) - held_out_batches(len(batches))]))

    def report(done: int) -> None:
        if progress is not None:
            progress(size * sum(map(len, batches[:done])), size * total)

    if work is None:
        calibration = module.to(device), batches, loss
        return CalibrationResult.of(dict(state), calibration, symmetries=False, progress=report)
    if portions := module.portions():
        raise ConfigError(
            f"--blockwise does not combine with a model whose weights transformers merges or splits as it loads them: "
            f"{portions[0].name!r} is not one tensor on disk; leave out --blockwise"
        )
    module.assign(state)
    calibration = module.to(device), batches, loss
    return calibrate_in_blocks(state, calibration, folder=work, symmetries=False, world=world, progress=report)


def next_token_loss(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the summed cross-entropy of each next token, in nats; ids (rows, length)."""
    ids = ids.to(next(module.parameters()).device)
    logits = module(ids).logits[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum")


def sequences(tokenizer: Any, text: Path, tokens: int, length: int) -> Tensor:
    """Return about `tokens` tokens of a text in sequences, (sequences, length), in a fixed order.

    Every sequence begins with the special tokens that the tokenizer puts first, as a document does. Of a short text
    the sequences are shorter.
    """
    prefix = list(tokenizer("")["input_ids"])[:1]
    own_length = length - len(prefix)
    parts = list(_parts(_read(text), max(2, tokens // length), own_length * _TEXT_BYTES))
    ids = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts]
    if (count := sum(map(len, ids))) < _LEAST_TOKENS:
        raise DataError(f"{text} has {count} tokens, too few to calibrate on; give tens of thousands")
    if len(parts) == 1:  # at least two, one of which is held out
        own_length = min(own_length, len(ids[0]) // 2)
    starts = [(part, start) for part in ids for start in range(0, len(part) - own_length + 1, own_length)]
    if len(starts) < 2:
        raise DataError(f"{text} has no sequence of {own_length} tokens to calibrate on; give more text")
    count = min(max(2, tokens // (own_length + len(prefix))), len(starts))
    chosen = [starts[index] for index in np.unique(np.linspace(0, len(starts) - 1, count).astype(int))]
    # permuted, so that the held-out batches, which are the last, come from all of the text as well
    order = np.random.default_rng(0).permutation(len(chosen))
    return torch.tensor([prefix + chosen[index][0][chosen[index][1] :][:own_length] for index in order])


def _read(text: Path) -> str:
    try:
        return text.read_bytes().decode("utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"cannot read {text}: {reason}; give a text to calibrate on") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{text} is not UTF-8 at byte {error.start:,}; give a text to calibrate on") from error


def _parts(text: str, count: int, size: int) -> Iterator[str]:
    """Yield a text, or `count` parts of it of `size` letters if it is much longer, spread evenly."""
    if len(text) <= count * size:
        yield text
        return
    for start, end in pairwise(np.linspace(0, len(text), count + 1).astype(int).tolist()):
        yield text[start : min(start + size, end)]
