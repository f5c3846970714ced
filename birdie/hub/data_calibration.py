"""Calibration of a Hugging Face folder on data: a language model on a text, an image classifier on a folder of images.

    text.txt ──tokenizer of the folder──► sequences ──────┐
    images ──image processor of the folder──► pixels ─────┴─► batches ─┐
    folder ──from_pretrained──► model in float32, with names on disk ──┴──► CalibrationResult

No code of one's own is needed, and no labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.calibrate import Where, calibrate_module
from birdie.compress.calibration.image_files import BATCH_IMAGES, batched, read_image, require_images
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.synthetic import LENGTHS
from birdie.errors import ConfigError, DataError
from birdie.hub.library_loading import load_part, load_weights
from birdie.hub.names_on_disk import NamesOnDisk

TOKENS = 65_536
LENGTH = 1024  # tokens of a sequence, if the model takes so many
_BATCH_TOKENS, _BATCH_LOGITS = 4096, 1 << 27  # bound memory: the activations of one batch are held at a time
_LEAST_TOKENS = 64
_TEXT_BYTES = 16  # read for each token that is needed, spread over the text


def calibrate_on_text(
    folder: Path, state: Mapping[str, Tensor], text: Path, *, tokens: int = TOKENS, **where: Unpack[Where]
) -> CalibrationResult:
    """Calibrate the language model of a folder, in float32, or with `offload` in the dtypes of the file.

    Args:
        folder: with configuration, tokenizer and weights.
        state: its tensors, by their names on disk.
        text: UTF-8; of a long one, parts from all over it are used.
        tokens: of all sequences; a fifth is held out.
        where: see `Where`.
    """
    if tokens < _LEAST_TOKENS:
        raise ConfigError(f"{tokens} calibration tokens are too few; give {_LEAST_TOKENS} at least")
    tokenizer = load_part(folder, "AutoTokenizer", "tokenizer")
    config = load_part(folder, "AutoConfig", "configuration").get_text_config()
    length = min([LENGTH, *(value for name in LENGTHS if isinstance(value := getattr(config, name, None), int))])
    rows = sequences(tokenizer, text, tokens, length)
    model = _load(folder, "AutoModelForCausalLM", "language model", len(state), where)
    if int(rows.max()) >= model.get_input_embeddings().num_embeddings:
        raise ConfigError(f"the tokenizer of {folder} has more tokens than its model; give the files of one model")
    size = min(_BATCH_TOKENS, _BATCH_LOGITS // int(getattr(config, "vocab_size", 1))) // rows.shape[1]
    module = NamesOnDisk(model, state, folder, use_cache=False)
    return calibrate_folder(module, state, batched(rows, max(1, size)), next_token_loss, rows.shape[1], **where)


def calibrate_on_images(
    folder: Path, state: Mapping[str, Tensor], images: Sequence[Path], **where: Unpack[Where]
) -> CalibrationResult:
    """Calibrate the image classifier of a folder, as `calibrate_on_text` does, by the KL of its predictions.

    Args:
        folder: with configuration, image processor and weights.
        state: its tensors, by their names on disk.
        images: files; a fifth is held out.
        where: see `Where`.
    """
    require_images(images)
    processor = load_part(folder, "AutoImageProcessor", "image processor")
    pixels = torch.stack([_pixels(processor, path) for path in images])
    module = NamesOnDisk(
        _load(folder, "AutoModelForImageClassification", "image classifier", len(state), where), state, folder
    )
    return calibrate_folder(module, state, batched(pixels, BATCH_IMAGES), class_loss, **where)


def _load(folder: Path, kind: str, noun: str, tensors: int, where: Where) -> Any:
    """Return the model of a folder, in float32; to save memory with `offload`, in the dtypes on disk."""
    dtype: Any = torch.float32 if where.get("offload") is None else "auto"
    return load_weights(folder, kind, noun, tensors, dtype=dtype).eval()


def calibrate_folder(
    module: NamesOnDisk,
    state: Mapping[str, Tensor],
    batches: Sequence[Tensor],
    loss: Any,
    size: int = 1,
    **where: Unpack[Where],
) -> CalibrationResult:
    """Calibrate a model under the names that its tensors have on disk.

    Args:
        state: its tensors, by their names on disk.
        batches: inputs; some of the last are held out.
        loss: (module, batch) → summed cross-entropy, in nats.
        size: of a sample, in units of the progress.
        where: see `Where`.
    """
    if where.get("offload") is not None:
        if portions := module.portions():
            raise ConfigError(
                "--offload does not combine with a model whose weights transformers merges or splits as it loads "
                f"them: {portions[0].name!r} is not one tensor on disk; leave out --offload"
            )
        module.assign(state)
    sizes = [size * len(batch) for batch in batches]
    return calibrate_module(state, (module, batches, loss), sizes, symmetries=False, **where)


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


def class_loss(module: nn.Module, pixels: Tensor) -> Tensor:
    """Return a cross-entropy of (images, 3, height, width), whose curvature does not depend on the labels."""
    weight = next(module.parameters())
    logits = module(pixels.to(weight.device, weight.dtype)).logits.float()
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="sum")


def _pixels(processor: Any, path: Path) -> Tensor:
    """Return the pixels of an image as the model takes them, (3, height, width)."""
    pixels: Tensor = read_image(
        path, lambda image: processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    )
    return pixels
