"""Made-up arguments by their names, with sizes that the configuration of a model has."""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from birdie.compress.calibration.modes import measuring_mode
from birdie.compress.calibration.runs import Runs
from birdie.compress.calibration.synthetic import LENGTHS as TEXT_LENGTHS
from birdie.compress.calibration.synthetic import SAMPLES, noise_images, noise_sounds
from birdie.errors import ConfigError
from birdie.hub.fitting import Fit

_EDGE, _LATENT_EDGE = 224, 32  # of images, and of latents of images, whose size no configuration names
LAYOUTS = 5  # usual shapes of sounds, series, latents and what is unknown
SHORT = 16  # tokens of the shortest text
_DECODED = 64  # tokens that the decoder of an encoder-decoder takes
_FRAMES = 64  # of spectrograms whose length no configuration names
_DIFFUSION_STEPS = 1000
_SOUND_LATENTS = 4096  # length of a sound of a diffusion model, where no configuration names it
_GRIDS = {"grid_thw", "image_grid_thw", "image_grid_hws"}
_VIDEO = 5  # frames of a video whose length no configuration names
_FEATURES, _FEW = 53, 2  # features of unknown kind, until a layer tells; values of unknown ids
_CONDITION, _POSITIONS = 77, 64  # tokens that condition a diffusion model, and positions of latents in a row
LENGTHS = (*TEXT_LENGTHS, "max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_target_positions")
TEXT = ("text_config", "text_encoder", "encoder", "vlm_config", "")  # parts of a configuration, in the order of asking
DECODER = ("decoder", "decoder_config", "text_config", "")
_VISION = ("vision_config", "encoder", "backbone_config", "")
_SOUND = ("audio_config", "audio_encoder", "encoder", "encoder_config", "")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Arguments of a forward function, with sizes that the configuration leaves open.

    Attributes:
        names: of the arguments.
        length: of a text, in tokens.
        layout: which of the usual shapes sounds, series, latents and so on have.
        other: which of the usual shapes arguments have of which nothing is known.
        halvings: of the sizes that the configuration leaves open, to save work.
        fits: sizes that layers of the model expect.
    """

    names: tuple[str, ...]
    length: int
    layout: int
    other: int = 0
    halvings: int = 0
    fits: tuple[Fit, ...] = ()


class Sizes:
    """Sizes of made-up arguments, as the configuration of a model and an attempt have them."""

    def __init__(self, model: Any, attempt: Attempt, generator: torch.Generator) -> None:
        self.model, self.config, self.generator = model, model.config, generator
        self.layout, self.other, self.halvings = attempt.layout, attempt.other, attempt.halvings
        self.latent = not hasattr(model, "main_input_name")  # of diffusers
        self.is_packed = bool(_GRIDS.intersection(inspect.signature(model.forward).parameters))
        self.length = max(min(attempt.length, SHORT), attempt.length >> attempt.halvings)
        self.device = next((weight.device for weight in model.parameters()), torch.device("cpu"))

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
        if isinstance(end, int) and 0 <= end < vocabulary and parts is TEXT:
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


def _images(sizes: Sizes, samples: int) -> Tensor:
    parts = _VISION
    channels, size = sizes.count("num_channels", "in_channels", parts=parts, default=3), sizes.image_size()
    if sizes.is_packed:
        times = sizes.count("temporal_patch_size", parts=parts, default=1)
        edge = sizes.count("patch_size", parts=parts, default=16)
        shape = (channels, edge, edge) if sizes.layout == 1 else (channels * times * edge * edge,)
        return sizes.normal(samples * sizes.grid() ** 2, *shape)
    frames = sizes.value("num_frames", parts=parts, default=(None, _VIDEO, 1)[min(sizes.layout, 2)])
    if isinstance(frames, int):
        return _videos(sizes, samples, frames)
    return noise_images(channels, samples, sizes.generator, size)


def _videos(sizes: Sizes, samples: int, frames: int) -> Tensor:
    channels, size = sizes.count("num_channels", "in_channels", parts=_VISION, default=3), sizes.image_size()
    return noise_images(channels, samples * frames, sizes.generator, size).view(samples, frames, channels, *size)


def with_image_tokens(sizes: Sizes, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose tokens stand for an image as often as the model makes tokens of one, if it makes any."""
    token, ids, pixels = (
        sizes.value("image_token_id", "image_token_index"),
        keywords["input_ids"],
        keywords["pixel_values"],
    )
    if not isinstance(token, int) or not hasattr(sizes.model, "get_image_features"):
        return keywords
    image = {"pixel_values": pixels[: sizes.grid() ** 2 if sizes.is_packed else 1]}
    image |= {name: value[:1] for name, value in keywords.items() if name in _GRIDS}
    try:
        with measuring_mode(sizes.model), Runs(sizes.model).run(0):
            features = sizes.model.get_image_features(**{name: value.to(sizes.device) for name, value in image.items()})
    except TypeError:  # it needs more than an image
        count = sizes.count("num_query_tokens", default=0)
    else:
        width = sizes.count("hidden_size", "n_embd", "d_model", parts=TEXT, default=1)
        count = sum(part.numel() for part in tree_leaves(getattr(features, "pooler_output", features))) // width
    ids = torch.cat((ids[:, :1], torch.full((len(ids), count), token), ids[:, 1:]), 1)
    keywords = {**keywords, "input_ids": ids}
    if "attention_mask" in keywords:
        keywords["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in inspect.signature(sizes.model.forward).parameters:
        keywords["mm_token_type_ids"] = (ids == token).long()
    return keywords


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


def _text(sizes: Sizes, samples: int) -> Tensor:
    """Return tokens; or those of codebooks or choices, as samples, before the tokens, or after them."""
    count, length = sizes.count("num_codebooks", parts=TEXT, default=2), sizes.length
    if sizes.layout == 0:
        return sizes.tokens(samples, length, TEXT)
    ids = sizes.tokens(samples * count, length, TEXT)
    if sizes.layout == 1:
        return ids
    ids = ids.view(samples, count, length)
    return ids if sizes.layout == 2 else ids.mT.contiguous()


def _decoded(sizes: Sizes, samples: int) -> Tensor:
    codebooks = sizes.count("num_codebooks", parts=("decoder",), default=1)
    return sizes.tokens(samples * codebooks, min(sizes.length, _DECODED), DECODER)


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
        return sizes.tokens(samples, sizes.length, TEXT)
    if sizes.layout == 1:
        return _images(sizes, samples)
    return noise_sounds(1, SAMPLES[min(sizes.halvings, 2)], samples, sizes.generator)[:, 0]


def _latents(sizes: Sizes, samples: int) -> Tensor:
    """Return noise of a diffusion model, (samples, channels, height, width); or with frames, or without a height."""
    channels, (height, width) = sizes.count("in_channels", default=4), sizes.image_size()
    if sizes.layout == 2:
        return sizes.normal(
            samples, channels, max(width, _SOUND_LATENTS) if sizes.value("sample_size") is None else width
        )
    if sizes.layout == 3:
        return sizes.normal(samples, channels)
    frames = sizes.count("sample_frames", "num_frames", default=_VIDEO)
    shape = ((channels,), (channels, frames), (), (), (frames, channels))[sizes.layout]
    return sizes.normal(samples, *shape, height, width)


def _packed_latents(sizes: Sizes, samples: int) -> Tensor:
    """Return such noise, or positions in a row with their channels, as many as `img_ids` has."""
    if sizes.is_packed:
        return _images(sizes, samples)
    if sizes.layout != 2:
        return _latents(sizes, samples)
    return sizes.normal(samples, _POSITIONS, sizes.count("in_channels", default=64))


def _times(sizes: Sizes, samples: int) -> Tensor:
    return sizes.integers(_DIFFUSION_STEPS, samples).float()


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
    """Return images in front of the convolutions that make them as large as latents, or such latents in a row."""
    if sizes.layout == 2:
        return _packed_latents(sizes, samples)
    convolutions = len(sizes.value("conditioning_embedding_out_channels", default=[0] * 4)) - 1
    height, width = (edge << convolutions for edge in sizes.image_size())
    channels = sizes.count("conditioning_channels", default=3)
    return noise_images(channels, samples, sizes.generator, (height, width))


Maker = Callable[[Sizes, int], Any]
MAKERS: dict[str, Maker] = {
    "input_ids": _text,
    "decoder_input_ids": _decoded,
    "qformer_input_ids": lambda s, n: s.tokens(n, s.length, ("qformer_config",)),
    "bbox": _boxes,
    "token_type_ids": _token_types,
    "attention_mask": lambda s, n: torch.ones(n, s.length, dtype=torch.long),
    "decoder_attention_mask": lambda s, n: torch.ones(n, min(s.length, _DECODED), dtype=torch.long),
    "inputs": _any_kind,
    "pixel_values": _images,
    "pixel_values_videos": lambda s, n: _videos(s, n, s.count("num_frames", parts=_VISION, default=4)),
    **dict.fromkeys(("grid_thw", "image_grid_thw"), lambda s, n: torch.tensor([[1, s.grid(), s.grid()]] * n)),
    "image_grid_hws": lambda s, n: torch.tensor([[s.grid(), s.grid()]] * n),
    "merge_sizes": lambda s, n: torch.full((n,), s.count("spatial_merge_size", "merge_size", parts=_VISION, default=2)),
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
    "timestep": _times,
    "encoder_hidden_states": _condition,
    "pooled_projections": lambda s, n: s.normal(n, s.count("pooled_projection_dim", default=768)),
    "class_labels": lambda s, n: s.integers(s.count("num_embeds_ada_norm", "num_class_embeds", default=1), n),
    "added_cond_kwargs": _added,
    "controlnet_cond": _control,
    "guidance": lambda s, n: torch.ones(n) if s.value("guidance_embeds") else None,
    "img_ids": lambda s, _: s.integers(8, _POSITIONS, 3).float(),
    "txt_ids": lambda *_: torch.zeros(_CONDITION, 3),
}
MASKS = {"attention_mask", "decoder_attention_mask"}
IF_NEEDED = {
    *MASKS,
    "class_labels",
    "encoder_hidden_states",
    "hidden_states",
    "sample",
    "timestep",
    "inputs",
    "pixel_values_videos",
    "token_type_ids",
}
"""Arguments that mean something else where they are optional."""
OF_LENGTH = {*_GRIDS, "input_ids", "bbox", "inputs", "decoder_input_ids"}
OF_LAYOUT = {
    "input_ids",
    "pixel_values",
    "input_values",
    "input_features",
    "past_values",
    "inputs",
    "sample",
    "hidden_states",
}


def maker_of(name: str, annotation: Any) -> Maker:
    """Return what makes an argument up; of an unknown one its name and annotation tell the kind.

    Args:
        name: of an argument of a forward function.
        annotation: of it in the signature.
    """
    if name == "timestep" and "Long" in str(annotation):
        return lambda s, n: _times(s, n).long()
    if (known := MAKERS.get(name)) is not None:
        return known
    if annotation in (int, float, bool):
        return lambda *_: annotation(1)
    if "mask" in name:
        return lambda s, n: torch.ones(n, _CONDITION if name.startswith("encoder") else s.length, dtype=torch.long)
    if "timestep" in name:
        return _times
    if name.startswith("position"):
        return lambda s, n: torch.arange(s.length).repeat(n, 1)
    if name.endswith(("ids", "id", "tokens", "inputs", "indices", "labels", "index")):
        return lambda s, n: s.integers(_FEW, n, *([s.length] if s.other != 1 else []))
    return _features_of_unknown_kind


def _features_of_unknown_kind(sizes: Sizes, samples: int) -> Tensor:
    """Return features of positions or of samples, images or videos of features, or positions in two dimensions."""
    height = width = _LATENT_EDGE
    shapes = (
        (_POSITIONS, _FEATURES),
        (_FEATURES,),
        (_FEATURES, height, width),
        (_FEATURES, _VIDEO, height, width),
        (1, _POSITIONS, _FEATURES),
    )
    return sizes.normal(samples, *shapes[sizes.other])
