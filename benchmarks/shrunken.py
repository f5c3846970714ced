"""Configurations of other people's models, made small by rule: sizes are known by the words in their names.

    widths ÷ 32, 2 layers, 256 words, images of 32 × 32 ──► a model of a few hundred thousand weights

Widths are all divided by the same number, so what was equal, a multiple or a sum stays so. Variants go from small to
large; the first of which a model can be made, and which runs, is taken.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY, POSITIONS, PIXELS, PATCH, EXPERTS = 256, 128, 32, 8, 4
DIVISORS, LAYERS, HEADS = (64, 32, 16, 8, 4, 2, 1), (2, 4, 0), (0, 4)  # of widths; most layers and heads, 0 for all
_LEAST_WIDTH = 16  # narrower is no width: channels of images, heads, taps
_LARGE = 256  # widths that stay at least _LEAST_WIDTH

_WIDTH = re.compile(
    r"hidden|width|d_model|model_dim|n_embd|embed|_dim|dim$|dims$|channels|intermediate|inner|ffn|d_ff|d_kv|rank|mlp|"
    r"feature|filter|_size$|sizes$|_planes|d_head|head_dim|head_size|key_length|value_length"
)
_NOT_WIDTH = re.compile(
    r"layer|depth|head(s|_count)$|drop|prob|ratio|kernel|act|window|stride|token|_id$|index|image|patch|vocab|position|"
    r"input_size|crop|grid|chunk|block_size|num_mel|_bins|sampl|max_|temporal|fft|hop|codebook_size|spatial|pool|beta|"
    r"label|batch|group_size|type_|segment|context"
)
_LAYERS = re.compile(
    r"(^|_)n?(um)?_?layers?$|num_.*layers$|n_layer|^depth|(^|_)depth(s)?$|num_.*blocks?$|blocks_per_stage|layers_per|_layers$"
)
_HEADS = re.compile(r"heads?$|heads_count$|n_head$")
_DERIVED = re.compile(r"^out_features$|^out_indices$|^_out_|stage_names|_layer_ids")
_DROPPED = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}


def variants(config: Any) -> Iterator[Any]:
    """Yield smaller configurations of the class of a configuration of transformers, the smallest first."""
    settings = _settings(config.to_dict())
    for size in sizes(settings):
        try:
            yield type(config)(**shrunken(settings, *size))
        except Exception:  # whatever a class objects to: the next one is less small
            continue


def sizes(settings: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return a divisor of the widths, the most layers and the most heads; those first that divide all widths well."""
    widths = [value for value in _widths("", settings) if value >= _LARGE]
    every = [(divisor, layers, heads) for layers in LAYERS for heads in HEADS for divisor in DIVISORS]
    return sorted(every, key=lambda size: not all(not w % size[0] and w // size[0] >= _LEAST_WIDTH for w in widths))


def _widths(key: str, value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _widths(str(name), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _widths(key, item)
    elif _is_width(key, value):
        yield value


def _is_width(key: str, value: Any) -> bool:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST_WIDTH
    return is_size and bool(_WIDTH.search(key)) and not _NOT_WIDTH.search(key)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _DROPPED and key != "model_type"}


def shrunken(values: Mapping[str, Any], divisor: int, layers: int, heads: int = 0) -> dict[str, Any]:
    """Return settings with sizes that are smaller, those of their parts too.

    Args:
        values: name → setting, of a configuration or of the arguments of a class.
        divisor: of widths.
        layers: most layers of a stack; 0 leaves them. Lists with an item for each layer become as long.
        heads: most heads; 0 leaves them.
    """
    counts = {value for key, value in values.items() if isinstance(value, int) and _LAYERS.search(str(key))}
    ids: dict[int, int] = {}

    def smaller(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return shrunken(value, divisor, layers, heads)
        if isinstance(value, list | tuple):
            per_layer = layers and len(value) in counts and len(value) > layers
            return type(value)(smaller(key, item) for item in (value[:layers] if per_layer else value))
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return _size(key, value, divisor, layers, heads, ids)

    return {
        key: smaller(str(key), value)
        for key, value in values.items()
        if not (layers and _DERIVED.search(str(key))) and key not in ("id2label", "label2id")
    }


def _size(key: str, value: int, divisor: int, layers: int, heads: int, ids: dict[int, int]) -> int:
    """Return a smaller size; which kind it is of, its name says."""
    if re.search(r"token_id$|_token_index$|token_ids?$|_id$|_index$", key) and value >= VOCABULARY:
        return ids.setdefault(value, VOCABULARY - 1 - len(ids))
    if re.search(r"vocab", key):
        return min(value, VOCABULARY)
    if re.search(r"codebook_size|num_embeddings|n_codes|max_2d_position|type_vocab", key):
        return min(value, POSITIONS)
    if re.search(r"max_.*position|n_positions|n_ctx|max_seq|max_.*length|max_source|max_target|context_length", key):
        return min(value, POSITIONS) if value > 0 else value
    if re.search(r"(image|input|crop|sample)_size|^img_size", key):
        return min(value, PIXELS) if value > PIXELS else value
    if re.search(r"patch_size", key):
        return min(value, PATCH)
    if re.search(r"num_.*experts$|n_routed_experts|moe_num_experts|num_local_experts", key):
        return min(value, EXPERTS)
    if re.search(r"experts_per_tok|top_?k|n_group|topk_group|num_experts_per", key):
        return min(value, 2)
    if layers and _LAYERS.search(key):
        return min(value, layers)
    if heads and value > heads and _HEADS.search(key):
        return heads
    if re.search(r"groups$", key) and value >= _LEAST_WIDTH:
        return max(1, value // divisor)
    return max(1, value // divisor) if _is_width(key, value) and value % divisor == 0 else value
