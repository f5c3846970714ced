"""Configurations of other people's models, made small by rule: sizes are known by the words in their names.

    widths ÷ 32, 2 layers, 256 words, images of 32 × 32 ──► a model of a few hundred thousand weights

What was equal, a multiple or a sum stays so. Widths are all divided by the same number; heads are divided too, and the
size of one head by the rest, so that heads × size of a head is still the width. The layers that are kept are of each
kind that there was, and lists of layers name those. Variants differ in what is left as it is, and go from small to
large; the first of which a model can be made, and which runs, is taken.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

VOCABULARY, POSITIONS, PIXELS, PATCH, FRAMES, EXPERTS = 256, 128, 32, 8, 8, 4
DIVISORS = (64, 32, 16, 8, 4, 2, 1)  # of widths
_LEAST_WIDTH = 16  # narrower is no width: channels of images, heads, taps
_LEAST_HEAD = 4  # of one head: two pairs of a rotary embedding
_ALIGNED = 4  # widths in steps of 16 bytes, which products of groups of matrices (experts) ask for
_NORM_GROUPS = 32  # of channels, where the code of a class has that number
_LARGE = 256  # widths that stay at least _LEAST_WIDTH
_MOST_NAMED = 4  # layers that a list names and that are all kept


class Size(NamedTuple):
    """Sizes of a variant: divisor of the widths, most layers of a stack, fewest heads, most pixels; 0 leaves them."""

    divisor: int
    layers: int = 2
    heads: int = 4
    pixels: int = PIXELS


_KINDS: tuple[tuple[int, int, int], ...] = (  # layers, heads, pixels: each leaves something else as it is
    (2, 4, PIXELS),
    (2, 4, 0),
    (2, 1, PIXELS),
    (4, 4, PIXELS),
    (2, 0, PIXELS),
    (0, 4, PIXELS),
    (0, 0, 0),
)

_WIDTH = re.compile(
    r"hidden|width|d_model|model_dim|n_embd|embed|_dim|dim$|dims$|channels|intermediate|inner|ffn|d_ff|rank|mlp|"
    r"feature|filter|_size$|sizes$|_planes|units$|_channel$|channel_list$|^dim_|_configs?$|resnet_head$"
)
_SURELY_WIDTH = re.compile(
    r"(hidden|features?|embed|embedding|proj|projection|token|pooler_output)_(dims?|size)$|initial_channel$"
)
_NOT_WIDTH = re.compile(
    r"layer|depth|head(s|_count)$|drop|prob|ratio|kernel|act|window|stride|token|_id$|index|image|patch|vocab|position|"
    r"input_size|crop|grid|chunk|block_size|num_mel|_bins|sampl|max_|temporal|fft|hop|codebook_size|spatial|spec_|pool|beta|"
    r"label|batch|group_size|type_|segment|context|feat(ure)?_sizes"
)
_LAYERS = re.compile(
    r"(^|_)n?(um)?_?layers?$|num_.*layers$|n_layer|^depth|(^|_)depth(s)?$|num_.*blocks?$|blocks_per_stage|layers_per|_layers$"
)
_STAGES = re.compile(r"depths?$|blocks|layers_per|num.*_layers$")  # lists: layers of each stage
_HEADS = re.compile(r"(?<!d_)(?<!dim_)(heads?|heads_count)(_per_layer|_per_stage)?$")
_HEAD_SIZE = re.compile(
    r"head_?dims?$|d_head$|dim_heads?$|attention_head_size|pointer_head_size|d_kv$|key_length|value_length|kv_channels|rotary_dim$"
)
_SECTIONS = re.compile(r"mrope_section|axes_dims?(_rope)?$|rope_axes_dim$|rope_dim(_list)?$")
_NAMED_LAYERS = re.compile(r"ind(ex|ic)es$|_idxs?$|_ids$|(?<!proj_)layers?$|attention_blocks$")
_DERIVED = re.compile(r"^out_features$|^_out_|stage_names")  # from out_indices
_DROPPED = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}
_TOKEN = re.compile(r"token_id$|_token_index$|token_ids?$|_id$|_index$")


def variants(config: Any) -> Iterator[tuple[Size, Any]]:
    """Yield sizes and smaller configurations of the class of a configuration of transformers, the smallest first."""
    dropped = {*_DROPPED, "model_type"}
    for size, smaller in distinct({key: value for key, value in config.to_dict().items() if key not in dropped}):
        try:
            yield size, type(config)(**smaller)
        except Exception:  # whatever a class objects to: the next one is less small
            continue


def distinct(settings: Mapping[str, Any]) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield sizes and the smaller settings that they leave, each of those once."""
    known = set()
    for size in sizes(settings):
        smaller = shrunken(settings, size)
        if (text := repr(smaller)) not in known:
            known.add(text)
            yield size, smaller


def sizes(settings: Mapping[str, Any]) -> list[Size]:
    """Return sizes of variants; those first that divide most widths and sizes of heads well."""
    widths = [value for value in _widths("", settings) if value >= _LARGE]

    def misfits(divisor: int) -> int:
        heads = list(_head_sizes(settings, Size(divisor)))
        return sum(
            (
                any(width % divisor or width // divisor < _LEAST_WIDTH for width in widths),
                any(width // divisor % _ALIGNED for width in widths),
                any(head % rest or head // rest % _LEAST_HEAD for head, rest in heads),
            )
        )

    return [Size(divisor, *kind) for divisor in sorted(DIVISORS, key=misfits) for kind in _KINDS]


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
    if not _is_number(value) or value < _LEAST_WIDTH or _HEAD_SIZE.search(key):
        return False
    return bool(_SURELY_WIDTH.search(key) or (_WIDTH.search(key) and not _NOT_WIDTH.search(key)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _head_sizes(values: Mapping[str, Any], size: Size, inherited: int = 1) -> Iterator[tuple[int, int]]:
    """Yield sizes of one head with their divisor."""
    heads = _head_divisor(values, size) or inherited
    rest = size.divisor // heads
    counts = [value for key, value in values.items() if _HEADS.search(str(key)) and _is_number(value) and value > 0]
    head_sizes = [
        value for key, value in values.items() if _HEAD_SIZE.search(str(key)) and _is_number(value) and value > 0
    ]
    width: Any = next((values[key] for key in ("hidden_size", "d_model", "n_embd", "embed_dim") if key in values), None)
    if not head_sizes and counts and _is_number(width):
        head_sizes = [width // max(counts)]
    yield from ((one, rest) for one in head_sizes if one >= _LEAST_WIDTH)
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _head_sizes(value, size, heads)


def _head_divisor(values: Mapping[str, Any], size: Size) -> int:
    """Return the number that heads are divided by, 0 if there are none.

    It is a power of two that divides the number of heads of each kind, so that groups of heads stay as large; where a
    single head may stay, it divides the heads of attention, and others that are fewer become one.
    """
    some = [value for key, value in values.items() if _HEADS.search(str(key))]
    counts = {n for value in some for n in (value if isinstance(value, list | tuple) else [value]) if _is_number(n)}
    counts = {n for n in counts if n > 1}
    if not counts or not size.heads:
        return int(bool(counts))
    main: Any = values.get("num_attention_heads")
    most: int = main if _is_number(main) else max(counts)
    among = [most] if size.heads == 1 else counts
    divisors = [one for one in DIVISORS if not size.divisor % one and most // one >= size.heads]
    return next((one for one in divisors if not any(n % one for n in among)), 1)


def shrunken(values: Mapping[str, Any], size: Size, heads: int = 1) -> dict[str, Any]:
    """Return settings with sizes that are smaller, those of their parts too.

    Args:
        values: name → setting, of a configuration or of the arguments of a class.
        size: what to leave. Lists with an item for each layer become as long as there are layers.
        heads: divisor of the heads of settings that these are a part of.
    """
    heads = _head_divisor(values, size) or heads
    stacks = _stacks(values, size.layers)
    lists = {str(key): value for key, value in values.items() if _is_list_of_layers(str(key), value)}
    is_named = any(_named(key, value, stacks) is None for key, value in lists.items())  # layers of a list of stages
    ids: dict[int, int] = {}

    def smaller(key: str, value: Any, *, is_item: bool = False) -> Any:
        if isinstance(value, dict):
            return shrunken(value, size, heads)
        if isinstance(value, list | tuple):
            if _SECTIONS.search(key) and all(map(_is_number, value)):
                return type(value)(_sections(value, size.divisor // heads, 1 if "section" in key else 2))
            if (stack := _named(key, value, stacks)) is not None:
                first = int(value[-1] == stack)
                return type(value)(
                    stacks[stack].index(item - first) + first for item in value if item - first in stacks[stack]
                )
            if _STAGES.search(key) and is_named:
                return value
            kept = None if is_item else stacks.get(len(value))
            items = value if kept is None else [value[position] for position in kept]
            return type(value)(smaller(key, item, is_item=True) for item in items)
        if not _is_number(value):
            return value
        if _TOKEN.search(key) and value >= VOCABULARY:
            return ids.setdefault(value, VOCABULARY - 1 - len(ids))
        if _HEADS.search(key):
            return max(1, value // heads) if value > 0 else value
        if _LAYERS.search(key):
            is_stack = value in stacks and not is_item  # an item is the number of layers of a stage
            return len(stacks[value]) if is_stack else min(value, size.layers or value)
        if _HEAD_SIZE.search(key) and value >= _LEAST_WIDTH:
            return max(2, value // (size.divisor // heads) // 2 * 2)
        for word, rule in _RULES:
            if re.search(word, key):
                return rule(value, size)
        is_divided = _is_width(key, value) and value % size.divisor == 0
        return value // size.divisor if is_divided else value

    return {
        key: smaller(str(key), value)
        for key, value in values.items()
        if not (size.layers and _DERIVED.search(str(key))) and key not in ("id2label", "label2id")
    }


def _stacks(values: Mapping[str, Any], layers: int) -> dict[int, list[int]]:
    """Return number of layers → those that are kept: one of each kind and those that a short list names.

    The number of stages, each of which has its number of layers in a list, stays.
    """
    lists = {str(key): value for key, value in values.items() if isinstance(value, list | tuple) and value}
    stages = {len(value) for key, value in lists.items() if _STAGES.search(key) and all(map(_is_number, value))}
    counts = {value for key, value in values.items() if _is_number(value) and _LAYERS.search(str(key))}
    result: dict[int, list[int]] = {}
    for count in sorted(counts):
        result[count] = list(range(count))
        if not layers or count <= layers or count in stages:
            continue
        named = [value for key, value in lists.items() if _named(key, value, result) == count]
        named = [[item - (value[-1] == count) for item in value] for value in named]
        always = {item for value in named if len(value) <= _MOST_NAMED for item in value}
        per_layer = [value for value in lists.values() if len(value) == count]
        kinds: dict[Any, int] = {}
        for layer in range(count):
            kinds.setdefault(repr([[one[layer] for one in per_layer], [layer in one for one in named]]), layer)
        chosen = sorted(kinds.values())[: max(layers, _MOST_NAMED)]
        others = [layer for layer in range(count) if layer not in always and layer not in chosen]
        some = [*sorted(always), *(layer for layer in chosen if layer not in always), *others]
        result[count] = sorted(some[: max(layers, len(always | set(chosen)))])
    return result


def _is_list_of_layers(key: str, value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value or not all(map(_is_number, value)):
        return False
    return bool(_NAMED_LAYERS.search(key)) and value[0] >= 0 and all(a < b for a, b in pairwise(value))


def _named(key: str, value: Sequence[Any], stacks: Mapping[int, Any]) -> int | None:
    """Return the number of layers of the stack whose layers a list names, from 0 or up to that number, if it does."""
    if not _is_list_of_layers(key, value):
        return None
    return next((count for count in sorted(stacks) if count >= value[-1] and (count > value[-1] or value[0])), None)


def _sections(value: Sequence[int], divisor: int, unit: int) -> list[int]:
    """Return parts of the size of a head, multiples of a unit, whose sum is divided."""
    ends = [round(end / divisor / unit) * unit for end in accumulate(value)]
    return [end - start for start, end in pairwise([0, *ends])]


def _most(number: int) -> Callable[[int, Size], int]:
    return lambda value, _: min(value, number)


def _pixels(value: int, size: Size) -> int:
    return min(value, size.pixels or value)


_RULES: tuple[tuple[str, Callable[[int, Size], int]], ...] = (  # words of a name, size; the first that fits
    (r"vocab", _most(VOCABULARY)),
    (r"num_frames$|frames_per_clip$", _most(FRAMES)),
    (r"num_(object_)?queries|num_proposals", _most(PIXELS)),
    (r"attention_window$", _most(PIXELS)),  # inputs are padded to a multiple of it, and have fewer positions
    (r"^(ch|base_channels)$", lambda value, size: max(value // size.divisor, min(value, _NORM_GROUPS))),
    (r"codebook_size|num_embeddings|n_codes|max_2d_position|type_vocab", _most(POSITIONS)),
    (
        r"max_.*position|n_positions|n_ctx|max_seq|max_.*length|max_source|max_target|context_length",
        _most(POSITIONS),
    ),
    (r"(image|input|crop|sample)_size|^img_size", _pixels),
    (r"patch_size", lambda value, size: min(value, PATCH if size.pixels else value)),
    (r"num_.*experts$|n_routed_experts|moe_num_experts|num_local_experts|zero_expert_num", _most(EXPERTS)),
    (r"index_topk", _most(PIXELS)),  # of positions
    (r"experts_per_tok|top_?k|moe_k$|n_group$|topk_group|num_experts_per|num_expert_group", _most(2)),
    (r"first_k_dense", _most(1)),
    (r"(interval|period|frequency|_pattern|group_size|every_n(_layers)?)$", lambda v, size: min(v, size.layers or v)),
    (r"(?<!output_)groups$", lambda value, size: max(1, value // size.divisor) if value >= _LEAST_WIDTH else value),
)
