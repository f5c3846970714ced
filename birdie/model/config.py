"""What a GPT is made of: its shape, and which of the records' techniques it has. All of these are off by default.

Which part a setting belongs to is where its words are explained: `embedding` (n-gram tables, smear), `attention`
(rotary positions, exclusive attention, values, gates), `mlp`, `gpt` (skips, loops, lanes, head), `initial`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from birdie.errors import ConfigError

Smear = Literal["none", "fixed", "gated"]
Gate = Literal["none", "output", "dense", "sparse"]
Activation = Literal["relu2", "leaky_relu2", "swiglu"]
Parallel = Literal["joint", "lanes"]
Softcap = Literal["tanh", "poly", "asymmetric"]

_WHOLE = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "gate_window", "bigram_dim")
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


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape, techniques and initial values of a `GPT`.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    vocab_size: Annotated[int, Parameter(env_var="VOCAB_SIZE", help="Number of token ids.")] = 1024
    num_layers: Annotated[int, Parameter(env_var="NUM_LAYERS", help="Number of blocks.")] = 9
    model_dim: Annotated[int, Parameter(env_var="MODEL_DIM", help="Width of the residual stream.")] = 512
    num_heads: Annotated[int, Parameter(env_var="NUM_HEADS", help="Query heads.")] = 8
    num_kv_heads: Annotated[
        int, Parameter(env_var="NUM_KV_HEADS", help="Key–value heads; divides the query heads.")
    ] = 4
    mlp_mult: Annotated[float, Parameter(env_var="MLP_MULT", help="Width of the MLP over the model's.")] = 2.0
    tie_embeddings: Annotated[bool, Parameter(env_var="TIE_EMBEDDINGS", help="Input and output embedding are one.")] = (
        True
    )
    embed_dim: Annotated[
        int,
        Parameter(
            env_var=("EMBEDDING_DIM", "EMBED_DIM"),
            help="Width of the embedding, projected to the model's; 0: the same.",
        ),
    ] = 0
    bos_id: Annotated[int, Parameter(help="Token a document begins with: nothing is mixed across it.")] = 1

    rope_base: Annotated[float, Parameter(env_var="ROPE_BASE", help="Base of the rotary frequencies.")] = 10_000.0
    rope_dims: Annotated[
        int, Parameter(env_var="ROPE_DIMS", help="Dimensions of a head that are turned by position; 0: all.")
    ] = 0
    rope_train_seq_len: Annotated[
        int,
        Parameter(
            env_var="ROPE_TRAIN_SEQ_LEN", help="Length beyond which the base grows with the sequence (NTK); 0: never."
        ),
    ] = 0
    qk_gain_init: Annotated[float, Parameter(env_var="QK_GAIN_INIT", help="First gain of each query head.")] = 1.5
    xsa_last_n: Annotated[
        int, Parameter(env_var="XSA_LAST_N", help="Last layers whose heads lose their own value's direction (XSA).")
    ] = 0
    value_embed_dim: Annotated[
        int, Parameter(env_var="VE_DIM", help="Width of the value embedding shared by --model.value-embed-layers.")
    ] = 128
    value_embed_layers: Annotated[
        tuple[int, ...],
        Parameter(negative=(), help="Layers whose values get a second embedding of the token (VE_LAYERS=9,10)."),
    ] = ()
    value_residual: Annotated[
        bool, Parameter(env_var="VALUE_RESIDUAL", help="Values are mixed with the first layer's.")
    ] = False
    attn_gate: Annotated[
        Gate, Parameter(help="Gate on heads: output (2σ, starts at 1), dense (all inputs), sparse (first inputs).")
    ] = "none"
    gate_window: Annotated[
        int, Parameter(env_var="GATE_WINDOW", help="First inputs that the output and sparse gates and smear look at.")
    ] = 12
    sparse_gate_scale: Annotated[
        float, Parameter(env_var="SPARSE_ATTN_GATE_SCALE", help="Factor inside the sparse gate.")
    ] = 1.0
    attention: Annotated[str, Parameter(help="How heads attend: softmax, or a name given to `attention.register`.")] = (
        "softmax"
    )
    isolate_documents: Annotated[bool, Parameter(help="Attention does not look past the beginning of a document.")] = (
        False
    )

    attn_window: Annotated[int, Parameter(help="Places that windowed layers see, themselves included; 0: all.")] = 0
    attn_window_layers: Annotated[
        tuple[int, ...], Parameter(negative=(), help="Layers with that window; none given: all of them.")
    ] = ()

    bigram_vocab_size: Annotated[
        int, Parameter(env_var="BIGRAM_VOCAB_SIZE", help="Rows of the table of hashed token pairs; 0: none.")
    ] = 0
    bigram_dim: Annotated[int, Parameter(env_var="BIGRAM_DIM", help="Width of that table.")] = 128
    trigram: Annotated[bool, Parameter(env_var="TRIGRAM", help="Hashed triples use the table too.")] = False
    smear: Annotated[
        Smear, Parameter(help="A token sees its predecessor's embedding: fixed (a share by channel), gated (by token).")
    ] = "none"

    activation: Annotated[
        Activation, Parameter(env_var="ACTIVATION", help="Of the MLP: relu2, leaky_relu2 or swiglu.")
    ] = "relu2"
    leaky_slope: Annotated[float, Parameter(env_var="LEAKY_SLOPE", help="Of leaky_relu2 below zero.")] = 0.5

    ln_scale: Annotated[
        bool, Parameter(env_var="LN_SCALE", help="Normed inputs of layer i are divided by √(i + 1).")
    ] = False
    skip_gates: Annotated[
        bool, Parameter(env_var="SKIP_GATES_ENABLED", help="Skips are blended in by a gate, not added.")
    ] = False
    num_loops: Annotated[
        int, Parameter(env_var="NUM_LOOPS", help="Times that layers loop_start … loop_end are run again.")
    ] = 0
    loop_start: Annotated[int, Parameter(env_var="LOOP_START", help="First looped layer.")] = 0
    loop_end: Annotated[int, Parameter(env_var="LOOP_END", help="Last looped layer.")] = 0
    enable_looping_at: Annotated[
        float, Parameter(env_var="ENABLE_LOOPING_AT", help="Share of the run after which layers loop.")
    ] = 0.0
    parallel_start_layer: Annotated[
        int | None,
        Parameter(env_var="PARALLEL_START_LAYER", help="Layer from which attention and MLP run side by side."),
    ] = None
    parallel: Annotated[
        Parallel, Parameter(help="joint: both read and write one stream; lanes: each has a stream of its own.")
    ] = "joint"

    softcap: Annotated[
        Softcap, Parameter(env_var="SOFTCAP_TYPE", help="Of the logits: tanh, poly, or asymmetric (two caps, learned).")
    ] = "tanh"
    logit_softcap: Annotated[float, Parameter(env_var="LOGIT_SOFTCAP", help="Bound c of c·tanh(logits/c).")] = 30.0

    tied_embed_init_std: Annotated[
        float, Parameter(env_var="TIED_EMBED_INIT_STD", help="Standard deviation of a new tied embedding.")
    ] = 0.005
    orthogonal_init: Annotated[
        bool, Parameter(env_var="ORTHO_INIT", help="Matrices of 64 × 64 and more start orthogonal.")
    ] = False
    overtone_init: Annotated[
        bool, Parameter(env_var="OVERTONE_INIT", help="The embedding starts with singular values like overtones.")
    ] = False
    phased_init: Annotated[
        bool, Parameter(help="Early layers start with more of the embedding mixed in than late ones.")
    ] = False

    def __post_init__(self) -> None:
        for name in _WHOLE:
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
                f"enable_looping_at is {self.enable_looping_at}; it is a share of the run, from 0 to below 1"
            )
        if self.bigram_vocab_size == 1:
            raise ConfigError("bigram_vocab_size is 1; give at least 2 rows, or 0 for none")
        if self.trigram and not self.bigram_vocab_size:
            raise ConfigError("trigram needs a table; set bigram_vocab_size as well")
        if self.value_embed_layers and not self.value_embed_dim:
            raise ConfigError("value_embed_layers needs a width; set value_embed_dim")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose {', '.join(known)}")

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
            raise ConfigError(f"lanes from layer {start} on would begin anew in each loop; start after {self.loop_end}")
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
        """Dimensions of a head that are turned by position."""
        return self.rope_dims or self.head_dim

    @property
    def mlp_hidden(self) -> int:
        """Hidden units of an MLP."""
        return round(self.mlp_mult * self.model_dim)

    @property
    def token_dim(self) -> int:
        """Width of the embedding."""
        return self.embed_dim or self.model_dim

    def layers(self, looping: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers in the order they run, (encoder, decoder): the first half is pushed, the second pops.

        With loops the list is that of layers as they are run, so a layer may be in both and run several times.
        """
        segment = list(range(self.loop_start, self.loop_end + 1))
        again = segment * self.num_loops if looping else []
        order = [*range(self.loop_end + 1), *again, *range(self.loop_end + 1, self.num_layers)]
        half = len(order) // 2
        return tuple(order[:half]), tuple(order[half:])

    @property
    def num_skips(self) -> int:
        """Outputs of the encoder that the decoder takes: never more than it has layers."""
        return max(min(len(encoder), len(decoder)) for encoder, decoder in map(self.layers, (False, True)))


_CHOICES: dict[str, tuple[str, ...]] = {
    "smear": ("none", "fixed", "gated"),
    "attn_gate": ("none", "output", "dense", "sparse"),
    "activation": ("relu2", "leaky_relu2", "swiglu"),
    "parallel": ("joint", "lanes"),
    "softcap": ("tanh", "poly", "asymmetric"),
}
