"""Settings of a GPT: its shape, and which techniques of the records it has. All techniques are off by default.

This is the one flat table `[model]` of a recipe. The module of a technique (`gpt.model.techniques`) explains what
its settings mean. Settings that must change when a preset shrinks the model say how (`_scaled`), so presets need not
know them by name.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from birdie.errors import ConfigError

Smear = Literal["none", "fixed", "gated"]
Gate = Literal["none", "output", "dense", "sparse"]
Activation = Literal["relu2", "leaky_relu2", "swiglu"]
Parallel = Literal["joint", "lanes"]
Softcap = Literal["tanh", "poly", "asymmetric"]
AdaptedPart = Literal["q", "k", "v", "o", "mlp", "head"]
ADAPTED_PARTS: tuple[AdaptedPart, ...] = get_args(AdaptedPart)
"""Parts of a GPT that low-rank adapters can change (`birdie.gpt.model.adapters`)."""

Scaling = Literal["width", "layer", "layers", "layer count", "head dims", "model dim", "tokens"]
"""Rule by which a setting follows the shape of the model: see `GPTConfig.resized`."""

_INTEGERS = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "gate_window", "bigram_dim")
_COUNTS = (
    "embed_dim",
    "bigram_vocab_size",
    "rope_dims",
    "rope_train_seq_len",
    "xsa_last_n",
    "value_embed_dim",
    "attn_window",
)
_POSITIVE = ("mlp_mult", "rope_base", "logit_softcap", "tied_embed_init_std", "leaky_slope", "sparse_gate_scale")


def _scaled(default: Any, by: Scaling) -> Any:
    """A setting with `default` that `GPTConfig.resized` changes."""
    return field(default=default, metadata={"scaling": by})


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape, techniques and initial values of a `GPT`.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    vocab_size: Annotated[int, Parameter(show=True, env_var="VOCAB_SIZE", help="Number of token ids.")] = 1024
    num_layers: Annotated[int, Parameter(show=True, env_var="NUM_LAYERS", help="Number of blocks.")] = 9
    model_dim: Annotated[int, Parameter(show=True, env_var="MODEL_DIM", help="Width of the residual stream.")] = 512
    num_heads: Annotated[int, Parameter(show=True, env_var="NUM_HEADS", help="Query heads.")] = 8
    num_kv_heads: Annotated[
        int, Parameter(show=True, env_var="NUM_KV_HEADS", help="Key–value heads; must divide the query heads.")
    ] = 4
    mlp_mult: Annotated[
        float, Parameter(show=True, env_var="MLP_MULT", help="Width of the MLP over that of the model.")
    ] = 2.0
    tie_embeddings: Annotated[
        bool, Parameter(env_var="TIE_EMBEDDINGS", help="Input and output share one embedding.")
    ] = True
    embed_dim: Annotated[
        int,
        Parameter(
            env_var=("EMBEDDING_DIM", "EMBED_DIM"),
            help="Width of the embedding, projected to the model's; 0: the model's width.",
        ),
    ] = _scaled(0, by="width")
    bos_id: Annotated[int, Parameter(help="Token that begins a document; techniques mix no tokens across it.")] = 1

    rope_base: Annotated[float, Parameter(env_var="ROPE_BASE", help="Base of the rotary frequencies.")] = 10_000.0
    rope_dims: Annotated[
        int, Parameter(env_var="ROPE_DIMS", help="Dimensions of a head with rotary positions; 0: all.")
    ] = _scaled(0, by="head dims")
    rope_train_seq_len: Annotated[
        int,
        Parameter(
            env_var="ROPE_TRAIN_SEQ_LEN",
            help="Length beyond which the rotary base grows with the sequence (NTK); 0: never.",
        ),
    ] = _scaled(0, by="tokens")
    qk_gain_init: Annotated[float, Parameter(env_var="QK_GAIN_INIT", help="Initial gain of each query head.")] = 1.5
    xsa_last_n: Annotated[
        int,
        Parameter(env_var="XSA_LAST_N", help="Last layers whose heads lose their component along the own value (XSA)."),
    ] = _scaled(0, by="layer count")
    value_embed_dim: Annotated[
        int, Parameter(env_var="VE_DIM", help="Width of the value embedding that --model.value-embed-layers share.")
    ] = _scaled(128, by="width")
    value_embed_layers: Annotated[
        tuple[int, ...],
        Parameter(negative=(), help="Layers whose values get a second embedding of the token (VE_LAYERS=9,10)."),
    ] = _scaled((), by="layers")
    value_residual: Annotated[
        bool, Parameter(env_var="VALUE_RESIDUAL", help="Values are mixed with the first layer's.")
    ] = False
    attn_gate: Annotated[
        Gate, Parameter(help="Gate on heads: output (2σ, starts at 1), dense (all inputs), sparse (first inputs).")
    ] = "none"
    gate_window: Annotated[
        int,
        Parameter(
            env_var=("GATE_WINDOW", "GATE_WIDTH", "SMEAR_GATE_WIDTH"),
            help="First inputs that output and sparse gates and gated smear read.",
        ),
    ] = _scaled(12, by="model dim")
    sparse_gate_scale: Annotated[
        float, Parameter(env_var="SPARSE_ATTN_GATE_SCALE", help="Factor inside the sparse gate.")
    ] = 1.0
    attention: Annotated[
        str, Parameter(help="Attention function: softmax, or a name registered in `attention_functions`.")
    ] = "softmax"
    isolate_documents: Annotated[bool, Parameter(help="Attention does not cross the beginning of a document.")] = False

    attn_window: Annotated[
        int, Parameter(help="Positions that windowed layers attend to, their own included; 0: all.")
    ] = _scaled(0, by="tokens")
    attn_window_layers: Annotated[
        tuple[int, ...], Parameter(negative=(), help="Layers with that window; without any: all layers.")
    ] = _scaled((), by="layers")

    bigram_vocab_size: Annotated[
        int, Parameter(env_var="BIGRAM_VOCAB_SIZE", help="Rows of the table of hashed token pairs; 0: none.")
    ] = _scaled(0, by="width")
    bigram_dim: Annotated[int, Parameter(env_var="BIGRAM_DIM", help="Width of that table.")] = _scaled(128, by="width")
    trigram: Annotated[bool, Parameter(env_var="TRIGRAM", help="Hashed token triples use the table too.")] = False
    smear: Annotated[
        Smear,
        Parameter(help="Mix in the embedding of the previous token: fixed (a share per channel), gated (per token)."),
    ] = "none"

    activation: Annotated[
        Activation, Parameter(env_var="ACTIVATION", help="Activation of the MLP: relu2, leaky_relu2 or swiglu.")
    ] = "relu2"
    leaky_slope: Annotated[float, Parameter(env_var="LEAKY_SLOPE", help="Slope of leaky_relu2 below zero.")] = 0.5

    ln_scale: Annotated[
        bool, Parameter(env_var="LN_SCALE", help="Normalized inputs of layer i are divided by √(i + 1).")
    ] = False
    skip_gates: Annotated[
        bool, Parameter(env_var="SKIP_GATES_ENABLED", help="Skips are blended in by a gate instead of added.")
    ] = False
    num_loops: Annotated[
        int, Parameter(env_var="NUM_LOOPS", help="Times that layers loop_start … loop_end are repeated.")
    ] = 0
    loop_start: Annotated[int, Parameter(env_var="LOOP_START", help="First repeated layer.")] = _scaled(0, by="layer")
    loop_end: Annotated[int, Parameter(env_var="LOOP_END", help="Last repeated layer.")] = _scaled(0, by="layer")
    enable_looping_at: Annotated[
        float, Parameter(env_var="ENABLE_LOOPING_AT", help="Fraction of the run after which layers are repeated.")
    ] = 0.0
    parallel_start_layer: Annotated[
        int | None,
        Parameter(env_var="PARALLEL_START_LAYER", help="Layer from which attention and MLP run in parallel."),
    ] = _scaled(None, by="layer")
    parallel: Annotated[
        Parallel, Parameter(help="joint: both read and write one residual stream; lanes: one residual stream each.")
    ] = "joint"

    softcap: Annotated[
        Softcap, Parameter(env_var="SOFTCAP_TYPE", help="Softcap of the logits: tanh, poly, or asymmetric (learned).")
    ] = "tanh"
    logit_softcap: Annotated[float, Parameter(env_var="LOGIT_SOFTCAP", help="Bound c of c·tanh(logits/c).")] = 30.0

    tied_embed_init_std: Annotated[
        float, Parameter(env_var="TIED_EMBED_INIT_STD", help="Initial standard deviation of a tied embedding.")
    ] = 0.005
    orthogonal_init: Annotated[
        bool, Parameter(env_var="ORTHO_INIT", help="Matrices of 64 × 64 and more start orthogonal.")
    ] = False
    overtone_init: Annotated[
        bool, Parameter(env_var="OVERTONE_INIT", help="Singular values of the embedding start as k^−½.")
    ] = False
    phased_init: Annotated[
        bool, Parameter(help="Early layers start with more of the embedding mixed in than late ones.")
    ] = False

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (*_COUNTS, "num_loops", "bos_id"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        self._check_shape()
        self._check_layers()
        if not 0 <= self.enable_looping_at < 1:
            raise ConfigError(
                f"enable_looping_at is {self.enable_looping_at}; it is a fraction of the run, from 0 to below 1"
            )
        if self.bigram_vocab_size == 1:
            raise ConfigError("bigram_vocab_size is 1; set at least 2 rows, or 0 for none")
        if self.trigram and not self.bigram_vocab_size:
            raise ConfigError("trigram needs a table; set bigram_vocab_size as well")
        if self.value_embed_layers and not self.value_embed_dim:
            raise ConfigError("value_embed_layers needs a width; set value_embed_dim")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose {', '.join(choices)}")

    def _check_shape(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.model_dim % (2 * self.num_heads):
            raise ConfigError(
                f"model_dim {self.model_dim} over num_heads {self.num_heads} is not an even head size, "
                f"which rotary positions need; choose a multiple of {2 * self.num_heads}"
            )
        if self.mlp_hidden < 1:
            raise ConfigError(f"mlp_mult {self.mlp_mult} leaves no hidden unit for model_dim {self.model_dim}")
        if self.rope_dims % 2 or self.rope_dims > self.head_dim:
            raise ConfigError(f"rope_dims is {self.rope_dims}; choose an even number up to the head's {self.head_dim}")
        if self.rope_train_seq_len and self.rotary_dims <= 2:
            raise ConfigError("rope_train_seq_len needs more than 2 rotary dimensions; raise rope_dims")
        if (self.attn_gate in ("output", "sparse") or self.smear == "gated") and self.gate_window > self.model_dim:
            raise ConfigError(f"gate_window {self.gate_window} is wider than model_dim {self.model_dim}")

    def _check_layers(self) -> None:
        for name in ("loop_start", "loop_end", "parallel_start_layer"):
            layer = getattr(self, name)
            if layer is not None and not 0 <= layer < self.num_layers:
                raise ConfigError(f"{name} is {layer}, but the model has layers 0 to {self.num_layers - 1}")
        for name in ("value_embed_layers", "attn_window_layers"):
            for layer in getattr(self, name):
                if not 0 <= layer < self.num_layers:
                    raise ConfigError(
                        f"{name} names layer {layer}, but the model has layers 0 to {self.num_layers - 1}"
                    )
        if self.attn_window_layers and not self.attn_window:
            raise ConfigError("attn_window_layers need a width; set attn_window")
        if self.loop_end < self.loop_start:
            raise ConfigError(f"loop_end {self.loop_end} comes before loop_start {self.loop_start}")
        start = self.parallel_start_layer
        if self.parallel == "lanes" and self.num_loops and start is not None and start <= self.loop_end:
            raise ConfigError(
                f"parallel lanes from layer {start} on would divide again at each repeat of the layers up to "
                f"{self.loop_end}; set parallel_start_layer after loop_end {self.loop_end}"
            )
        if self.xsa_last_n > self.num_layers:
            raise ConfigError(f"xsa_last_n is {self.xsa_last_n}, but the model has {self.num_layers} layers")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Width of all key heads, or all value heads, together."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_dims(self) -> int:
        """Dimensions of a head with rotary positions."""
        return self.rope_dims or self.head_dim

    @property
    def mlp_hidden(self) -> int:
        """Hidden units of an MLP."""
        return round(self.mlp_mult * self.model_dim)

    @property
    def token_dim(self) -> int:
        """Width of the embedding."""
        return self.embed_dim or self.model_dim

    def resized(self, *, width: float, depth: float, seq_len: int) -> "GPTConfig":
        """Return the settings of a smaller model with the same proportions.

        Heads shrink by the square root of the width, so they become narrower as well as fewer. Vocabulary and the ratio
        of query to key–value heads stay. Every other setting follows its `Scaling`:

            width        multiplied by `width`, at least 2; 0 stays 0
            layer(s)     moved to the same relative depth; None stays None
            layer count  the same share of the layers, rounded up
            head dims    the same share of a head, rounded up to an even number
            model dim    at most the new width
            tokens       at most `seq_len`

        Args:
            width: factor on the width of the model and on rows and widths of its tables.
            depth: factor on the number of layers.
            seq_len: longest sequence.
        """
        queries = self.num_heads // self.num_kv_heads  # per key–value head
        kv_heads = max(1, math.floor(self.num_kv_heads * math.sqrt(width)))
        heads = queries * kv_heads
        dim = 2 * heads * max(1, round(self.model_dim * width / (2 * heads)))
        layers = max(1, math.ceil(self.num_layers * depth))

        def moved(layer: int) -> int:
            return layer * layers // self.num_layers

        def scaled(value: Any, scaling: Scaling) -> Any:
            match scaling:
                case "width":
                    return max(2, round(value * width)) if value else 0
                case "layer":
                    return None if value is None else moved(value)
                case "layers":
                    return tuple(sorted({moved(layer) for layer in value}))
                case "layer count":
                    return math.ceil(value * layers / self.num_layers)
                case "head dims":
                    return 2 * math.ceil(value * (dim // heads) / self.head_dim / 2)
                case "model dim":
                    return min(value, dim)
                case "tokens":
                    return min(value, seq_len)

        settings: dict[str, Any] = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "model_dim": dim,
            "num_layers": layers,
        }
        settings |= {
            setting.name: scaled(getattr(self, setting.name), setting.metadata["scaling"])
            for setting in fields(self)
            if "scaling" in setting.metadata
        }
        start, end = settings["parallel_start_layer"], settings["loop_end"]
        if start is not None and self.parallel == "lanes" and self.num_loops:  # must come after the repeated layers
            settings["parallel_start_layer"] = min(max(start, end + 1), layers - 1)
        return replace(self, **settings)


_CHOICES: dict[str, tuple[str, ...]] = {
    "smear": ("none", "fixed", "gated"),
    "attn_gate": ("none", "output", "dense", "sparse"),
    "activation": ("relu2", "leaky_relu2", "swiglu"),
    "parallel": ("joint", "lanes"),
    "softcap": ("tanh", "poly", "asymmetric"),
}
