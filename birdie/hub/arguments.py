"""Made-up arguments of a model's forward function, by its signature and configuration.

    forward(input_ids, pixel_values, …) ──► arguments by their names ──┐
    configuration and its parts ──► their sizes ───────────────────────┴─► tried on a few samples ──► the first that run

A configuration does not tell everything: positions may begin at an offset, and sounds and latents may have channels or
frames. So there are a few attempts for each model; what its forward function accepts is taken. Whatever else a model
needs is calibrated on data or on `example_inputs`.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from birdie.compress.calibration.model_runs import Runs
from birdie.compress.calibration.modes import measuring_mode
from birdie.compress.calibration.synthetic import (
    LENGTH,
    LENGTHS,
    SAMPLES,
    Inputs,
    forward,
    noise_images,
    noise_sounds,
)
from birdie.errors import ConfigError

TRIED = 3  # samples of an attempt; two are a pair of something else too easily
_HALVINGS = 3  # of an image's edge, and so on
_SHORT, _DECODED = 16, 64  # tokens of the shortest text, and of the decoder of an encoder-decoder
_EDGE, _LATENT_EDGE = 224, 32  # of images, and of latents of images, whose size no configuration names
_FRAMES, _VIDEO = 64, 5  # of spectrograms and of videos whose length no configuration names
_CONDITION, _DIFFUSION_STEPS = 77, 1000  # tokens that condition a diffusion model, and its steps
_LAYOUTS = 3  # usual shapes of texts, images, sounds and latents
_ELEMENT, _CALL = 30, 200_000  # work of an element that is computed, and of a call, in that of FLOPs of a product
_GRIDS = {"grid_thw", "image_grid_thw", "image_grid_hws"}  # height and width of images in patches
_TEXT = ("text_config", "text_encoder", "encoder", "")  # parts of a configuration, in the order of asking
_DECODER = ("decoder", "decoder_config", "text_config", "")
_VISION = ("vision_config", "encoder", "backbone_config", "")
_SOUND = ("audio_config", "audio_encoder", "encoder", "encoder_config", "")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Arguments of a forward function, with sizes that the configuration leaves open."""

    names: tuple[str, ...]  # of the arguments
    length: int  # of a text, in tokens
    layout: int  # which of the usual shapes texts, images, sounds and latents have
    halvings: int = 0  # of the sizes that the configuration leaves open, to save work


class InputSizes:
    """Sizes of made-up arguments, as the configuration of a model and an attempt have them."""

    def __init__(self, model: Any, attempt: Attempt, generator: torch.Generator) -> None:
        self.config, self.generator = model.config, generator
        self.layout, self.halvings = attempt.layout, attempt.halvings
        self.latent = not hasattr(model, "main_input_name")  # of diffusers
        self.is_packed = bool(_GRIDS.intersection(inspect.signature(model.forward).parameters))
        self.length = max(min(attempt.length, _SHORT), attempt.length >> attempt.halvings)

    def value(self, *names: str, parts: Sequence[str] = ("",), default: Any = None) -> Any:
        """Return the first value that is set, of the names of one meaning, in parts of the configuration."""
        configs = [self.config if part == "" else getattr(self.config, part, None) for part in parts]
        for config, name in itertools.product([one for one in configs if one is not None], names):
            if (value := getattr(config, name, None)) is not None:
                return value
        return default

    def count(self, *names: str, parts: Sequence[str] = ("",), default: int) -> int:
        """Return such a value as a number; the first one of a list."""
        value = self.value(*names, parts=parts, default=default)
        return int(value[0] if isinstance(value, list | tuple) else value)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return random integers below `high`."""
        return torch.randint(0, max(1, high), shape, generator=self.generator, device="cpu")

    def normal(self, *shape: int) -> Tensor:
        """Return normal random numbers."""
        return torch.randn(shape, generator=self.generator, device="cpu")

    def tokens(self, samples: int, length: int, parts: Sequence[str]) -> Tensor:
        """Return random tokens, none of which stands for an image or sound; a text ends as the configuration says."""
        vocabulary = self.count("vocab_size", "num_hash_buckets", parts=parts, default=0)
        if not vocabulary:
            raise ConfigError("the configuration has no vocab_size")
        ids = self.integers(vocabulary, samples, length)
        for name in vars(self.config):
            if name.startswith(("image", "video", "audio", "boi", "eoi")):
                other = getattr(self.config, name, None)
                ids[ids == (other if isinstance(other, int) else -1)] = 0 if other else 1
        end = self.value("eos_token_id", parts=parts)
        if isinstance(end, int) and 0 <= end < vocabulary and parts is _TEXT:
            ids[ids == end] = 0 if end else 1
            ids[:, -1] = end
        return ids

    def grid(self) -> int:
        """Return the height and width of an image in patches, for models whose images have any size."""
        merged = self.count("spatial_merge_size", "merge_size", "downsample_factor", parts=_VISION, default=2)
        return merged * max(1, math.isqrt(self.length) // 4)  # small where a text is short

    def image_size(self) -> tuple[int, int]:
        """Return the height and width of images."""
        edge = (_LATENT_EDGE if self.latent else _EDGE) >> self.halvings
        size = self.value("image_size", "sample_size", "input_size", parts=_VISION, default=edge)
        if isinstance(size, Mapping):
            size = tuple(size.values())
        if isinstance(size, Sequence) and len(size) > 1:
            return int(size[-2]), int(size[-1])
        edge = int(size[0] if isinstance(size, Sequence) else size)
        return edge, edge


def _images(sizes: InputSizes, samples: int) -> Tensor:
    channels, size = sizes.count("num_channels", "in_channels", parts=_VISION, default=3), sizes.image_size()
    if sizes.is_packed:
        times = sizes.count("temporal_patch_size", parts=_VISION, default=1)
        edge = sizes.count("patch_size", parts=_VISION, default=16)
        shape = (channels, edge, edge) if sizes.layout == 1 else (channels * times * edge * edge,)
        return sizes.normal(samples * sizes.grid() ** 2, *shape)
    frames = sizes.value("num_frames", parts=_VISION, default=(None, _VIDEO, 1)[sizes.layout])
    images = noise_images(channels, samples * (frames or 1), sizes.generator, size)
    return images.view(samples, frames, *images.shape[1:]) if frames else images


def _waves(sizes: InputSizes, samples: int) -> Tensor:
    """Return sounds (samples, length) or with channels; spectrograms if the configuration has their size."""
    frames, bins = sizes.value("max_length"), sizes.value("num_mel_bins")
    if isinstance(frames, int) and isinstance(bins, int) and not sizes.value("conv_dim"):
        return noise_sounds(bins, frames, samples, sizes.generator).mT
    channels = sizes.count("audio_channels", parts=_SOUND, default=1)
    sounds = noise_sounds(channels, SAMPLES[min(sizes.halvings, 2)], samples, sizes.generator)
    has_channels = sizes.value("audio_channels", "codebook_size", parts=_SOUND) is not None
    return sounds if has_channels != (sizes.layout == 2) else sounds[:, 0] / sounds[:, 0].std(1, keepdim=True)


def _features(sizes: InputSizes, samples: int) -> Tensor:
    """Return features of sound: (samples, channels, frames), or with the frames before the channels."""
    names = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "model_in_dim", "input_dim")
    channels = sizes.count(*names, parts=_SOUND, default=80)
    positions = sizes.value("max_source_positions", parts=_SOUND)
    whisper = isinstance(positions, int) and sizes.value("input_feat_per_channel", parts=_SOUND) is None
    frames = 2 * int(positions) if whisper else _FRAMES
    features = noise_sounds(max(3, channels), frames, samples, sizes.generator)[:, :channels]
    return features if whisper != (sizes.layout == 1) else features.mT


def _text(sizes: InputSizes, samples: int) -> Tensor:
    """Return tokens; or those of several codebooks, as samples, or of choices."""
    if sizes.layout == 0:
        return sizes.tokens(samples, sizes.length, _TEXT)
    count = sizes.count("num_codebooks", parts=_TEXT, default=2)
    ids = sizes.tokens(samples * count, sizes.length, _TEXT)
    return ids if sizes.layout == 1 else ids.view(samples, count, sizes.length)


def _boxes(sizes: InputSizes, samples: int) -> Tensor:
    most = sizes.count("max_2d_position_embeddings", default=1024)
    return sizes.integers(min(1000, most), samples, sizes.length, 2, 2).sort(2).values.flatten(2)


def _latents(sizes: InputSizes, samples: int) -> Tensor:
    """Return noise of a diffusion model, (samples, channels, height, width); or with frames, or of a sound."""
    channels, (height, width) = sizes.count("in_channels", default=4), sizes.image_size()
    if sizes.is_packed:
        return _images(sizes, samples)
    if sizes.layout == 2:
        return sizes.normal(samples, channels, width)
    frames = (sizes.count("sample_frames", "num_frames", default=_VIDEO),) if sizes.layout else ()
    return sizes.normal(samples, channels, *frames, height, width)


def _condition(sizes: InputSizes, samples: int) -> Tensor:
    names = (
        *("caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "encoder_hid_dim"),
        "encoder_hidden_size",
    )
    return sizes.normal(samples, _CONDITION, sizes.count(*names, "cross_attention_dim", default=768))


def _added(sizes: InputSizes, samples: int) -> dict[str, Any]:
    times = 6 * sizes.count("addition_time_embed_dim", default=0)
    width = sizes.count("projection_class_embeddings_input_dim", default=0) - times
    if width <= 0:
        return {"resolution": None, "aspect_ratio": None}
    return {"text_embeds": sizes.normal(samples, width), "time_ids": torch.full((samples, 6), 512.0)}


def _control(sizes: InputSizes, samples: int) -> Tensor:
    """Return images in front of the convolutions that make them as large as latents."""
    convolutions = len(sizes.value("conditioning_embedding_out_channels", default=[0] * 4)) - 1
    height, width = (edge << convolutions for edge in sizes.image_size())
    return noise_images(sizes.count("conditioning_channels", default=3), samples, sizes.generator, (height, width))


Maker = Callable[[InputSizes, int], Any]
MAKERS: dict[str, Maker] = {
    "input_ids": _text,
    "decoder_input_ids": lambda s, n: s.tokens(n, min(s.length, _DECODED), _DECODER),
    "attention_mask": lambda s, n: torch.ones(n, s.length, dtype=torch.long),
    "bbox": _boxes,
    "pixel_values": _images,
    **dict.fromkeys(("grid_thw", "image_grid_thw"), lambda s, n: torch.tensor([[1, s.grid(), s.grid()]] * n)),
    "image_grid_hws": lambda s, n: torch.tensor([[s.grid(), s.grid()]] * n),
    "input_points": lambda s, n: torch.rand((n, 1, 1, 2), generator=s.generator, device="cpu") * min(s.image_size()),
    "input_values": _waves,
    "input_features": _features,
    "sample": _latents,
    "hidden_states": _latents,
    "timestep": lambda s, n: s.integers(_DIFFUSION_STEPS, n).float(),
    "encoder_hidden_states": _condition,
    "pooled_projections": lambda s, n: s.normal(n, s.count("pooled_projection_dim", default=768)),
    "class_labels": lambda s, n: s.integers(s.count("num_embeds_ada_norm", "num_class_embeds", default=1), n),
    "added_cond_kwargs": _added,
    "controlnet_cond": _control,
    "guidance": lambda s, n: torch.ones(n) if s.value("guidance_embeds") else None,
}
_OF_DIFFUSION = {"class_labels", "encoder_hidden_states", "hidden_states", "sample", "timestep"}
"""Arguments that mean something else in models of transformers, where they are optional."""
_OF_LENGTH = {*_GRIDS, "input_ids", "bbox", "decoder_input_ids"}
_OF_LAYOUT = {"input_ids", "pixel_values", "input_values", "input_features", "sample", "hidden_states"}


def maker_of(name: str, annotation: Any) -> Maker:
    """Return what makes an argument up; of an unknown one its name tells the kind: a mask, ids, or features."""
    if (known := MAKERS.get(name)) is not None:
        return known
    if annotation in (int, float, bool):
        return lambda *_: annotation(1)
    if "mask" in name:
        return lambda s, n: torch.ones(n, s.length, dtype=torch.long)
    if name.endswith(("ids", "id", "tokens", "indices", "labels", "index")):
        return lambda s, n: s.integers(2, n, s.length)
    width = f"{name.partition('_')[0]}_hidden_size"
    return lambda s, n: s.normal(n, _FRAMES, s.count(width, "hidden_size", default=768))


def input_names(model: Any) -> list[tuple[str, ...]]:
    """Return the sets of arguments to try: all that are known, with a mask, and those that are needed."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name for name, one in parameters.items() if one.default is inspect.Parameter.empty and one.kind not in kinds
    ]
    main = str(getattr(model, "main_input_name", ""))
    if main and main not in needed and main in parameters:
        needed.insert(0, main)
    known = [name for name in parameters if name in needed or (name in MAKERS and name != "attention_mask")]
    if main:
        known = [name for name in known if name in needed or name not in _OF_DIFFUSION]
        decoded = [name for name in known if name in needed or name == "decoder_input_ids"]
        masked = (
            [*known, "attention_mask"] if "attention_mask" in parameters and "attention_mask" not in known else known
        )
        sets = [known, decoded, needed, masked]
    else:  # what is optional differs between kinds of one class
        sets = [known, [name for name in known if name in needed or name == "timestep"], needed]
    return list(dict.fromkeys(map(tuple, sets)))


def attempts(model: Any) -> Iterator[Attempt]:
    """Yield what to try for a model of transformers or diffusers, from the most complete to the simplest."""
    texts = [getattr(model.config, part, None) if part else model.config for part in (*_TEXT, *_DECODER)]
    limits = [value for text in texts for name in LENGTHS if isinstance(value := getattr(text, name, None), int)]
    length = min([LENGTH, *(limit for limit in limits if limit > 1)])
    lengths = dict.fromkeys([length, max(length - 8, length // 2), min(length, _SHORT)])
    for names in input_names(model):
        tried = lengths if _OF_LENGTH.intersection(names) else [length]
        layouts = range(_LAYOUTS if _OF_LAYOUT.intersection(names) else 1)
        for size, layout in itertools.product(tried, layouts):
            yield Attempt(names, size, layout)


def arguments(model: Any, attempt: Attempt, samples: int, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of an attempt, for so many samples, on the model's device."""
    sizes = InputSizes(model, attempt, generator)
    parameters = inspect.signature(model.forward).parameters
    keywords: dict[str, Any] = {
        name: value
        for name in attempt.names
        if (value := maker_of(name, parameters[name].annotation)(sizes, samples)) is not None
    }
    is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if "use_cache" in parameters or (is_open and sizes.value("use_cache", parts=("", *_DECODER[:-1])) is not None):
        keywords["use_cache"] = False  # nothing follows; and caches know some kinds of layers only
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    return dict(tree_map_only(Tensor, lambda tensor: tensor.to(device), keywords))


class InputWork(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Counts the work in its context, in FLOPs of products that take as long; so files do not depend on clocks.

    Attributes:
        calls: work of functions, whatever the samples.
        samples: work that grows with the samples.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.samples = 0.0

    @property
    def total(self) -> float:
        """Work of both kinds."""
        return self.calls + self.samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and count it."""
        out = func(*args, **(kwargs or {}))
        self.calls += _CALL
        self.samples += _ELEMENT * sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.samples += flops(*args, **(kwargs or {}), out_val=out)
        return out


def work_of(model: nn.Module, keywords: Mapping[str, Any]) -> InputWork:
    """Return the work of a forward pass."""
    work = InputWork()
    with measuring_mode(model), Runs(model).run(0, keywords), work:
        forward(model, Inputs(keywords=keywords))
    return work


def first_accepted(model: nn.Module, generator: torch.Generator, most: float) -> tuple[Attempt, InputWork]:
    """Return the first attempt that the model accepts, and the work of `TRIED` samples.

    Sizes that no configuration names are halved until they are `most` work, or there is nothing left to halve.
    """
    reason: Exception | None = None
    for attempt in attempts(model):
        try:
            work = work_of(model, arguments(model, attempt, TRIED, generator))
        except Exception as error:  # whatever the code of the model raises
            reason = reason or error
            continue
        for halvings in range(1, _HALVINGS + 1):
            if work.total <= most:
                break
            smaller = replace(attempt, halvings=halvings)
            try:
                less = work_of(model, arguments(model, smaller, TRIED, generator))
            except Exception:  # too small for this model
                break
            if less.total < work.total:
                attempt, work = smaller, less
        return attempt, work
    unknown = ", ".join(name for name in input_names(model)[0] if name not in MAKERS)
    names = f" (nothing is known of {unknown})" if unknown else ""
    raise ConfigError(f"inputs of {type(model).__name__} cannot be made up{names}: {reason}") from reason
