"""Made-up arguments of a model's forward function, by its signature and configuration.

    forward(input_ids, pixel_values, …) ──► arguments that are known ─┐
    configuration and its parts ──► their sizes ──────────────────────┴─► tried on two samples ──► the first that run

A configuration does not tell everything: positions may begin at an offset, sounds may have channels, and images may
need tokens that stand for them. So there are a few attempts for each model; what its forward function accepts is taken.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from birdie.compress.calibration.modes import in_mode
from birdie.compress.calibration.synthetic import LENGTH, SAMPLES, Inputs, forward, noise_images, noise_sounds
from birdie.errors import ConfigError
from birdie.hub.calibration import LENGTHS

_EDGE, _LATENT_EDGE = 224, 32  # of images, and of latents of images, whose size no configuration names
_SHORT, _HALVINGS = 16, 3  # tokens of the shortest text; halvings of an image's edge, and so on
_DECODED = 64  # tokens that the decoder of an encoder-decoder takes
_FRAMES = 64  # of spectrograms whose length no configuration names
_DIFFUSION_STEPS = 1000
_CONDITION, _POSITIONS = 77, 64  # tokens that condition a diffusion model, and positions of latents in a row
_LENGTHS = (*LENGTHS, "max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_target_positions")
_TEXT = ("text_config", "text_encoder", "encoder", "vlm_config", "")  # parts of a configuration, in the order of asking
_DECODER = ("decoder", "decoder_config", "text_config", "")
_VISION = ("vision_config", "encoder", "backbone_config", "")
_SOUND = ("audio_config", "audio_encoder", "encoder", "encoder_config", "")
_ELEMENT, _CALL = 30, 200_000  # work of an element that is computed, and of a call, in that of FLOPs of a product


@dataclass(frozen=True, slots=True)
class Attempt:
    """Arguments of a forward function, with sizes that the configuration leaves open.

    Attributes:
        names: of the arguments.
        length: of a text, in tokens.
        layout: which of the usual shapes sounds and series have.
        halvings: of the sizes that the configuration leaves open, to save work.
    """

    names: tuple[str, ...]
    length: int
    layout: int
    halvings: int = 0


class Sizes:
    """Sizes of made-up arguments, as the configuration of a model and an attempt have them."""

    def __init__(self, model: Any, attempt: Attempt, generator: torch.Generator) -> None:
        self.model, self.config, self.generator = model, model.config, generator
        self.layout, self.halvings = attempt.layout, attempt.halvings
        self.latent = not hasattr(model, "main_input_name")  # of diffusers
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


def input_names(model: Any) -> list[list[str]]:
    """Return the sets of arguments to try: all that are known, those that are needed, and the main one."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name for name, one in parameters.items() if one.default is inspect.Parameter.empty and one.kind not in kinds
    ]
    main = str(getattr(model, "main_input_name", ""))
    if main and main not in needed and main in parameters:
        needed.insert(0, main)
    if unknown := [name for name in needed if name not in _MAKERS]:
        raise ConfigError(f"inputs of {type(model).__name__}, {', '.join(unknown)}, cannot be made up")
    if not main:  # diffusers: what is optional differs between kinds of one class
        known = [name for name in parameters if name in _MAKERS and name not in _MASKS]
        plain = [name for name in known if name != "class_labels" and not name.startswith("added")]
        return [known, plain, [name for name in known if name in needed or name == "timestep"], needed]
    unwanted = _IF_NEEDED - ({"token_type_ids"} if hasattr(model.config, "type_vocab_sizes") else set())
    known = [name for name in parameters if name in _MAKERS and (name in needed or name not in unwanted)]
    masked = [*known, *(name for name in parameters if name in _MASKS)]
    decoded = [*needed, *(name for name in known if name.startswith("decoder_input"))]
    return [known, masked, decoded, needed]


def attempts(model: Any) -> Iterator[Attempt]:
    """Yield what to try for a model of transformers or diffusers, from the most complete to the simplest.

    Raises:
        ConfigError: it needs an argument of which nothing is known.
    """
    config = getattr(model, "config", None)
    texts = [config, *(getattr(config, part, None) for part in (*_TEXT, *_DECODER) if part)]
    limits = [value for text in texts for name in _LENGTHS if isinstance(value := getattr(text, name, None), int)]
    length = min([LENGTH, *(limit for limit in limits if limit > 1)])
    lengths = [length, max(length - 8, length // 2), max(1, length // 2), min(length, _SHORT)]
    for names in dict.fromkeys(map(tuple, input_names(model))):
        for index, layout in itertools.product(range(4), range(3)):
            if index and not _OF_LENGTH.intersection(names):
                break
            if layout == 0 or _OF_LAYOUT.intersection(names):
                yield Attempt(names, lengths[index], layout)


def arguments(model: Any, attempt: Attempt, samples: int, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of an attempt, for so many samples, on the model's device."""
    sizes = Sizes(model, attempt, generator)
    keywords = {name: value for name in attempt.names if (value := _MAKERS[name](sizes, samples)) is not None}
    if "input_ids" in keywords and "pixel_values" in keywords:
        keywords["input_ids"] = _with_image_tokens(sizes, keywords["input_ids"], keywords["pixel_values"])
    return dict(tree_map_only(Tensor, lambda tensor: tensor.to(_device(model)), keywords))


def _device(model: nn.Module) -> torch.device:
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def first_accepted(model: nn.Module, generator: torch.Generator, most: float) -> tuple[Attempt, "Work"]:
    """Return the first attempt that the model accepts, and the work of two samples.

    Sizes that no configuration names are halved until two samples are `most` work, or there is nothing left to halve.

    Raises:
        ConfigError: it accepts none.
    """
    reason: Exception | None = None
    for attempt in attempts(model):
        try:
            work = work_of(model, arguments(model, attempt, 2, generator))
        except Exception as error:  # whatever the code of the model raises
            reason = reason or error
            continue
        for halvings in range(1, _HALVINGS + 1):
            if work.total <= most:
                break
            smaller = replace(attempt, halvings=halvings)
            try:
                less = work_of(model, arguments(model, smaller, 2, generator))
            except Exception:  # too small for this model
                break
            if less.total < work.total:
                attempt, work = smaller, less
        return attempt, work
    raise ConfigError(f"inputs of {type(model).__name__} cannot be made up: {reason}") from reason


@dataclass(slots=True)
class Work:
    """Work of a forward pass, in FLOPs of products that take as long; a count, so that files do not depend on clocks.

    Attributes:
        calls: of functions, whatever the samples.
        samples: grows with the samples.
    """

    calls: float = 0.0
    samples: float = 0.0

    @property
    def total(self) -> float:
        """Work of both kinds."""
        return self.calls + self.samples


def work_of(model: nn.Module, keywords: Mapping[str, Any]) -> Work:
    """Return the work of a forward pass.

    Raises:
        ConfigError: the model does not accept the arguments.
    """
    counter = _WorkCounter()
    with in_mode(model.modules(), training=False), torch.no_grad(), counter:
        forward(model, Inputs(keywords=keywords))
    return counter.work


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.work.calls += _CALL
        self.work.samples += _ELEMENT * sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.work.samples += flops(*args, **(kwargs or {}), out_val=out)
        return out


def _images(sizes: Sizes, samples: int) -> Tensor:
    parts = _VISION
    channels, size = sizes.count("num_channels", "in_channels", parts=parts, default=3), sizes.image_size()
    frames = sizes.value("num_frames", parts=parts)
    if not isinstance(frames, int):
        return noise_images(channels, samples, sizes.generator, size)
    return noise_images(channels, samples * frames, sizes.generator, size).view(samples, frames, channels, *size)


def _with_image_tokens(sizes: Sizes, ids: Tensor, pixels: Tensor) -> Tensor:
    """Return tokens, as many of which stand for an image as the model makes of one, if its images have any."""
    token = sizes.value("image_token_id", "image_token_index")
    if not isinstance(token, int) or not hasattr(sizes.model, "get_image_features"):
        return ids
    try:
        with torch.no_grad():
            features = sizes.model.get_image_features(pixel_values=pixels[:1].to(_device(sizes.model)))
    except TypeError:  # it needs more than an image
        count = sizes.count("num_query_tokens", default=0)
    else:
        width = sizes.count("hidden_size", "n_embd", "d_model", parts=_TEXT, default=1)
        count = sum(part.numel() for part in tree_leaves(getattr(features, "pooler_output", features))) // width
    return torch.cat((ids[:, :1], torch.full((len(ids), count), token), ids[:, 1:]), 1)


def _patches(sizes: Sizes, samples: int) -> Tensor:
    """Return patches with their row and column before them."""
    edge = 8
    patch = sizes.count("patch_size", parts=_VISION, default=16)
    pixels = sizes.normal(samples, edge * edge, 3 * patch * patch)
    grid = torch.cartesian_prod(torch.arange(1.0, edge + 1), torch.arange(1.0, edge + 1))
    return torch.cat((grid.expand(samples, -1, -1), pixels), 2)


def _waves(sizes: Sizes, samples: int) -> Tensor:
    """Return sounds (samples, length) or with channels; spectrograms if the configuration has their size."""
    frames, bins = sizes.value("max_length"), sizes.value("num_mel_bins")
    if isinstance(frames, int) and isinstance(bins, int) and not sizes.value("conv_dim"):
        return noise_sounds(bins, frames, samples, sizes.generator).mT
    channels = sizes.count("audio_channels", parts=_SOUND, default=1)
    sounds = noise_sounds(
        channels, SAMPLES[max(min(sizes.layout, 1), min(sizes.halvings, 2))], samples, sizes.generator
    )
    has_channels = sizes.value("audio_channels", "codebook_size", parts=_SOUND) is not None
    if has_channels != (sizes.layout == 2):
        return sounds
    return sounds[:, 0] / sounds[:, 0].std(1, keepdim=True)


def _features(sizes: Sizes, samples: int) -> Tensor:
    """Return features of sound: (samples, channels, frames), or with the frames before the channels."""
    channels = sizes.count(
        *("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "model_in_dim", "input_dim"),
        parts=_SOUND,
        default=80,
    )
    positions = sizes.value("max_source_positions", parts=_SOUND)
    whisper = isinstance(positions, int) and sizes.value("input_feat_per_channel", parts=_SOUND) is None
    spectrum = sizes.value("spec_size", parts=_SOUND)
    if isinstance(spectrum, int):  # one image of the spectrum, as long as it is wide
        frames = sizes.count("spec_size", parts=_SOUND, default=256) * spectrum // channels
        return noise_sounds(channels, frames, samples, sizes.generator).mT[:, None]
    frames = 2 * int(positions) if whisper else _FRAMES
    features = noise_sounds(max(3, channels), frames, samples, sizes.generator)[:, :channels]
    return features if whisper != (sizes.layout == 1) else features.mT


def _spectrogram(sizes: Sizes, samples: int) -> Tensor:
    bins = sizes.count("num_mel_bins", "model_in_dim", parts=("", "audio_config"), default=80)
    return noise_sounds(bins, _FRAMES, samples, sizes.generator).mT


def _boxes(sizes: Sizes, samples: int) -> Tensor:
    most = sizes.count("max_2d_position_embeddings", default=1024)
    corners = sizes.integers(min(1000, most), samples, sizes.length, 2, 2).sort(2).values
    return corners.flatten(2)


def _token_types(sizes: Sizes, samples: int) -> Tensor:
    """Return the column, row and rank of each token of a table."""
    types = sizes.value("type_vocab_sizes", default=[1])
    return torch.stack([sizes.integers(min(int(count), 8), samples, sizes.length) for count in types], 2)


def _decoded(sizes: Sizes, samples: int) -> Tensor:
    codebooks = sizes.count("num_codebooks", parts=("decoder",), default=1)
    return sizes.tokens(samples * codebooks, min(sizes.length, _DECODED), _DECODER)


def _past(sizes: Sizes) -> int:
    lags = sizes.value("lags_sequence", default=[0])
    return sizes.count("context_length", default=64) + int(max(lags))


def _series(sizes: Sizes, samples: int, length: int) -> Tensor:
    channels = sizes.count("num_input_channels", "input_size", default=1)
    series = sizes.normal(samples, length, channels).cumsum(1)
    has_channels = sizes.value("num_input_channels") is not None or channels > 1
    return series if has_channels != (sizes.layout == 2) else series[..., 0]


def _future(sizes: Sizes) -> int:
    return sizes.count("prediction_length", "horizon_length", default=1)


def _time(sizes: Sizes, samples: int, length: int) -> Tensor:
    features = sizes.count("num_time_features", default=0)
    return torch.linspace(-0.5, 0.5, length)[None, :, None].expand(samples, length, features).clone()


def _categories(sizes: Sizes, samples: int) -> Tensor | None:
    counts = list(sizes.value("cardinality", default=[]))[: sizes.count("num_static_categorical_features", default=0)]
    return torch.cat([sizes.integers(int(count), samples, 1) for count in counts], 1) if counts else None


def _constants(sizes: Sizes, samples: int) -> Tensor | None:
    count = sizes.count("num_static_real_features", default=0)
    return sizes.normal(samples, count) if count else None


def _image_positions(sizes: Sizes, samples: int) -> Tensor | None:
    """Return a mask of the tokens that stand for an image, the first ones."""
    count = sizes.value("latent_query_num")
    if not isinstance(count, int):
        return None
    positions = torch.arange(sizes.length).repeat(samples, 1)
    return positions < count


def _any_kind(sizes: Sizes, samples: int) -> Tensor:
    """Return what a model of any modality takes: tokens, images, or sounds."""
    if sizes.layout == 0:
        return sizes.tokens(samples, sizes.length, _TEXT)
    if sizes.layout == 1:
        return _images(sizes, samples)
    return noise_sounds(1, SAMPLES[min(sizes.halvings, 2)], samples, sizes.generator)[:, 0]


def _latents(sizes: Sizes, samples: int) -> Tensor:
    """Return noise of a diffusion model, (samples, channels, height, width); or with frames, or without a height."""
    channels, (height, width) = sizes.count("in_channels", default=4), sizes.image_size()
    if sizes.layout == 2:
        return sizes.normal(samples, channels, width)
    frames = [sizes.count("sample_frames", "num_frames", default=5)] if sizes.layout == 1 else []
    return sizes.normal(samples, channels, *frames, height, width)


def _packed_latents(sizes: Sizes, samples: int) -> Tensor:
    """Return such noise, or positions in a row with their channels, as many as `img_ids` has."""
    if sizes.layout < 2:
        return _latents(sizes, samples)
    return sizes.normal(samples, _POSITIONS, sizes.count("in_channels", default=64))


def _condition(sizes: Sizes, samples: int) -> Tensor:
    names = ("caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "encoder_hid_dim")
    return sizes.normal(samples, _CONDITION, sizes.count(*names, "cross_attention_dim", default=768))


def _added(sizes: Sizes, samples: int) -> dict[str, Any]:
    times = 6 * sizes.count("addition_time_embed_dim", default=0)
    width = sizes.count("projection_class_embeddings_input_dim", default=0) - times
    if width <= 0:
        return {"resolution": None, "aspect_ratio": None}
    return {"text_embeds": sizes.normal(samples, width), "time_ids": torch.full((samples, 6), 512.0)}


def _control(sizes: Sizes, samples: int) -> Tensor:
    """Return images in front of the convolutions that make them as large as latents."""
    convolutions = len(sizes.value("conditioning_embedding_out_channels", default=[0] * 4)) - 1
    height, width = (edge << convolutions for edge in sizes.image_size())
    channels = sizes.count("conditioning_channels", default=3)
    return noise_images(channels, samples, sizes.generator, (height, width))


_Maker = Callable[[Sizes, int], Any]
_MAKERS: dict[str, _Maker] = {
    "input_ids": lambda s, n: s.tokens(n, s.length, _TEXT),
    "decoder_input_ids": _decoded,
    "qformer_input_ids": lambda s, n: s.tokens(n, s.length, ("qformer_config",)),
    "bbox": _boxes,
    "token_type_ids": _token_types,
    "attention_mask": lambda s, n: torch.ones(n, s.length, dtype=torch.long),
    "decoder_attention_mask": lambda s, n: torch.ones(n, min(s.length, _DECODED), dtype=torch.long),
    "inputs": _any_kind,
    "pixel_values": _images,
    "image_embeds_position_mask": _image_positions,
    "flattened_patches": _patches,
    "input_points": lambda s, n: torch.rand((n, 1, 1, 2), generator=s.generator, device="cpu") * min(s.image_size()),
    "visual_feats": lambda s, n: s.normal(n, 16, s.count("visual_feat_dim", default=2048)),
    "visual_pos": lambda s, n: torch.rand((n, 16, 4), generator=s.generator, device="cpu"),
    "visual_embeds": lambda s, n: s.normal(n, 16, s.count("visual_embedding_dim", default=512)),
    "input_values": _waves,
    "input_features": _features,
    "spectrogram": _spectrogram,
    "decoder_input_values": _spectrogram,
    "is_longer": lambda _, n: torch.zeros(n, 1, dtype=torch.bool),
    "speaker_embeddings": lambda s, n: s.normal(n, s.count("speaker_embedding_dim", default=512)),
    "past_values": lambda s, n: _series(s, n, _past(s)),
    "past_time_features": lambda s, n: _time(s, n, _past(s)),
    "past_observed_mask": lambda s, n: torch.ones_like(_series(s, n, _past(s))),
    "static_categorical_features": _categories,
    "static_real_features": _constants,
    "future_values": lambda s, n: _series(s, n, _future(s)),
    "future_time_features": lambda s, n: _time(s, n, _future(s)),
    "states": lambda s, n: s.normal(n, 16, s.count("state_dim", default=1)),
    "actions": lambda s, n: s.normal(n, 16, s.count("act_dim", default=1)),
    "rewards": lambda s, n: s.normal(n, 16, 1),
    "returns_to_go": lambda s, n: s.normal(n, 16, 1),
    "timesteps": lambda _, n: torch.arange(16).repeat(n, 1),
    "sample": _latents,
    "hidden_states": _packed_latents,
    "timestep": lambda s, n: s.integers(_DIFFUSION_STEPS, n),
    "encoder_hidden_states": _condition,
    "pooled_projections": lambda s, n: s.normal(n, s.count("pooled_projection_dim", default=768)),
    "class_labels": lambda s, n: s.integers(s.count("num_embeds_ada_norm", "num_class_embeds", default=1), n),
    "added_cond_kwargs": _added,
    "controlnet_cond": _control,
    "guidance": lambda s, n: torch.ones(n) if s.value("guidance_embeds") else None,
    "img_ids": lambda s, _: s.integers(8, _POSITIONS, 3).float(),
    "txt_ids": lambda *_: torch.zeros(_CONDITION, 3),
}
_MASKS = {"attention_mask", "decoder_attention_mask"}
_IF_NEEDED = {
    *_MASKS,
    "class_labels",
    "encoder_hidden_states",
    "hidden_states",
    "sample",
    "timestep",
    "inputs",
    "token_type_ids",
}
"""Arguments that mean something else where they are optional."""
_OF_LENGTH = {"input_ids", "bbox", "inputs", "decoder_input_ids"}
_OF_LAYOUT = {"input_values", "input_features", "past_values", "inputs", "sample", "hidden_states"}
