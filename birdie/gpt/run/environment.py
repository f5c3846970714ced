"""Environment variables of the records' commands that do not map to exactly one setting.

A variable that sets one setting is declared on its field (`env_var`). This module has all others: switches that select
one word of a choice, variables that make a setting only together, variables for a dataclass that two tables use, and
`DEAD`, the variables that have no effect. They have the precedence of other variables: below flags, above the recipe
file. Variables in none of these tables are ignored, because an environment holds variables of many programs.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from birdie.errors import ConfigError
from birdie.gpt.run.values import parsed

Environment = Mapping[str, str]
Tables = dict[str, dict[str, Any]]

OFF = ("", "0", "none", "false", "off")
BITS = {"embedding": 8}  # the records' defaults; of matrices 6 and 12.85
CLIP_SIGMAS = {"embedding": 20.0}
LATE = 0.15  # learning-rate multiplier below which late QAT is on
VALUE_LAYERS = "9,10"
STRIDE = 64  # of sliding windows
MODEL_DIM = 512  # default of the challenge's script

CHOICES = {
    "SMEAR": ("smear", "fixed"),
    "SMEAR_GATE_ENABLED": ("smear", "gated"),
    "SMEAR_GATE": ("smear", "gated"),
    "ATTN_OUT_GATE_ENABLED": ("attn_gate", "output"),
    "GATE_ATTN_OUT": ("attn_gate", "output"),
    "GATED_ATTN_ENABLED": ("attn_gate", "dense"),
    "GATED_ATTENTION": ("attn_gate", "dense"),
    "SPARSE_ATTN_GATE_ENABLED": ("attn_gate", "sparse"),
}
"""Switch → the setting of `[model]` and the choice that the switch selects."""

AVERAGES = {"LAWA_ENABLED": "lawa", "EMA_ENABLED": "ema", "SWA_ENABLED": "swa"}
"""Switch → kind of average. The first that is on wins: in parameter-golf#549 LAWA precedes EMA; SWA is unused."""


@dataclass(frozen=True, slots=True)
class VariableRule:
    """Rule by which several variables, or one with more than one effect, become settings.

    Attributes:
        variables: the rule applies if any of them is set.
        settings: settings that the rule may change, as TABLE.SETTING.
        read: (environment, tables of the recipe file) → settings by table.
    """

    variables: tuple[str, ...]
    settings: tuple[str, ...]
    read: Callable[[Environment, Mapping[str, Any]], Tables]


@dataclass(frozen=True, slots=True)
class Dead:
    """Variables of the records that have no effect: of a technique that birdie does not support, or not needed.

    Attributes:
        reason: that they have none.
        variables: variables that turn the technique on, if their value is not off; or all, if there is no technique.
        details: variables of its options; they turn it on only if none of `variables` is set.
        off: values that leave it off, besides the usual ones.
    """

    reason: str
    variables: tuple[str, ...]
    details: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all its variables."""
        return (*self.variables, *self.details)

    def active_variables(self, environ: Environment) -> list[str]:
        """Return the variables in `environ` that are on, unless all that turn the technique on are off."""
        switches = [name for name in self.variables if name in environ]
        if switches and not any(self._on(environ[name]) for name in switches):
            return []
        return [name for name in self.names if name in environ and self._on(environ[name])]

    def _on(self, value: str) -> bool:
        return is_on(value) and value.strip().lower() not in self.off


ADAPTERS = (
    *("TTT_LORA_RANK", "TTT_LORA_LR", "TTT_LORA_ALPHA", "TTT_CHUNK_SIZE", "TTT_BATCH_SIZE"),
    *("TTT_BETA1", "TTT_BETA2", "TTT_WEIGHT_DECAY", "TTT_EVAL_SEQ_LEN", "TTT_WARM_START_A"),
)
"""Variables of test-time training with LoRA: if one of them is set, TTT_ENABLED means LoRA and not SGD."""

PARTS = {"TTT_Q_LORA": "q", "TTT_K_LORA": "k", "TTT_V_LORA": "v", "TTT_O_LORA": "o", "TTT_MLP_LORA": "mlp"}
"""Switch → the part of the model that LoRA adapts; the head is always adapted."""

SGD = ("lr", "epochs", "chunk_tokens", "momentum", "batch_seqs", "grad_clip")
"""Settings of SGD at test time. Two scoring modes have them, so the fields cannot declare a variable."""


def _dead(reason: str, variables: str, details: str = "", off: str = "") -> Dead:
    return Dead(reason, tuple(variables.split()), tuple(details.split()), tuple(off.split()))


DEAD = (
    _dead("a temperature other than by evaluation.temperature is not available", "TEMP_SCALING TEMP_CALIB EVAL_TEMP"),
    _dead("fp8 storage is not available", "FP_STORAGE"),
    _dead("prediction of several tokens is not available", "MTP_NUM_HEADS MTP_HEADS", "MTP_LOSS_WEIGHT"),
    _dead("YaRN is not available", "ROPE_TYPE ROPE_YARN", "YARN_MAX_LEN", off="rope"),
    _dead(
        "a low-rank correction of the tensors with the largest error is not available",
        "LQER_ENABLED",
        "LQER_RANK LQER_TOP_K LQER_FACTOR_BITS LQER_ASYM_ENABLED LQER_ASYM_GROUP",
    ),
    _dead("clipping by the Hessian is not available", "HESSIAN_CLIP_LAMBDA"),
    _dead(
        "a choice of bits by layer other than INT4_LAYERS is not available",
        "MIXED_QUANT N_INT6_LAYERS",
        "INT6_LAYER_START INT6_LAYER_END",
    ),
    _dead("bits set by QUANT_BITS, not MATRIX_BITS and EMBED_BITS, are not available", "QUANT_BITS QUANT_BITS_EMBED"),
    _dead("QAT other than by QAT_ENABLED and LATE_QAT is not available", "QAT QAT_INT6", "QAT_FRACTION"),
    _dead(
        "repeating layers other than by NUM_LOOPS, LOOP_START and LOOP_END is not available",
        "RECUR_LAYERS TRAINING_DEPTH_RECURRENCE EVAL_DEPTH_RECURRENCE",
        "RECUR_START_STEP REPEAT_UNTIE_MLP REPEAT_UNTIE_MLP_LAYERS",
    ),
    _dead("a second stage of repeated layers is not available", "LOOP_PHASE2_AT"),
    _dead(
        "parallel residuals other than by PARALLEL_START_LAYER are not available",
        "PARALLEL_RESIDUAL PARALLEL_RESIDUAL_START",
    ),
    _dead("a first layer without attention is not available", "DISABLE_LAYER0_ATTN"),
    _dead("another source of the output gate is not available", "GATE_ATTN_SRC", off="proj"),
    _dead("another initial value of gates is not available", "GATED_ATTN_INIT_STD SPARSE_ATTN_GATE_INIT_STD"),
    _dead("an n-gram bias within words is not available", "NGRAM_WITHIN_BETA NGRAM_WORD_BETA"),
    _dead("learning-rate warm-up is not available", "LR_WARMUP_STEPS"),
    _dead("another schedule of the learning rate is not available", "LR_SCHEDULE WARMDOWN_SHAPE", off="linear"),
    _dead("one weight decay for all, not MUON_WD and ADAM_WD, is not available", "WEIGHT_DECAY"),
    _dead("one learning rate of Adam, not EMBED_LR, HEAD_LR and SCALAR_LR, is not available", "ADAM_LR"),
    _dead("a choice of the matrices' optimizer is not available", "MATRIX_OPTIMIZER USE_GRAM_NS", off="muon"),
    _dead("an average that starts late is not available", "EMA_START_FRACTION", "EMA"),
    _dead("LoRA at test time other than by TTT_LORA_RANK is not available", "LORA_RANK"),
    _dead("an overlap of evaluation windows other than by EVAL_STRIDE is not available", "EVAL_OVERLAP"),
    _dead("a hashed bigram table other than by BIGRAM_VOCAB_SIZE is not available", "BIGRAM_HASH USE_BIGRAM_HASH"),
    _dead(
        "another kind of attention is not available",
        "ATTN_VARIANT DIFF_ATTN ATTN_RES ATTN_PROJ_TYPE",
        off="standard linear dense",
    ),
    _dead(
        "another output head is not available",
        "LOGIT_HEAD_TYPE UNTIE_AT_FRACTION",
        "TVERSKY_MEMBERSHIP TVERSKY_NUM_FEATURES TVERSKY_FEATURE_POOLS",
        off="standard linear dense",
    ),
    _dead("a grouped MLP is not available", "MLP_GROUPS", off="1"),
    _dead("a refiner after the blocks is not available", "REFINER", "REFINER_KERNEL"),
    _dead("a correction of the weights at test time is not available", "CORR_WEIGHT_LR"),
    _dead(
        "binary weights and activations are not available",
        "BINARIZE_ACTIVATIONS XNOR_GROUP_SIZE",
        "USE_INT8_KERNEL USE_TRITON_KERNEL SCALE_STORAGE SIGN_COMPRESS_REG",
    ),
    _dead(
        "training by evolution strategies is not available",
        "EGGROLL_LOAD EGGROLL_LAYERS",
        "EGGROLL_LORA_RANK EGGROLL_RANK EGGROLL_SIGMA EGGROLL_LR POP_SIZE FITNESS_SHAPING",
    ),
    _dead("a state-space model is not available", "D_STATE D_CONV EXPAND MLP_EVERY NUM_ATTN_LAYERS"),
    _dead(
        "a gated delta network is not available",
        "GDN_LAYERS",
        "GDN_HEAD_DIM_RATIO GDN_EXPAND_V GDN_CONV_SIZE HEAD_DIM_RATIO EXPAND_V CONV_SIZE",
    ),
    _dead(
        "prediction of representations (JEPA) is not available",
        "JEPA_WEIGHT JEPA_STEPS JEPA_PRETRAIN_FRAC",
        "PREDICTOR_HIDDEN_MULT PROJECTOR_TYPE CE_WEIGHT SIGREG_LAMBDA SIGREG_SCHEDULE DETACH_TARGETS",
    ),
    _dead(
        "a hierarchical byte model (H-Net) is not available",
        "OUTER_LAYERS",
        "TARGET_AVG_CHUNK_LEN RATIO_LOSS_WEIGHT HNET_LR_DIFF",
    ),
    _dead(
        "weights as Legendre coefficients are not available",
        "LEGENDRE_GROUPS NUM_VIRTUAL_LAYERS",
        "LEGENDRE_DEGREE_ATTN LEGENDRE_DEGREE_FFN MODE",
    ),
    _dead("the run folder has the artifact", "ARTIFACT_DIR"),
    _dead("DATA_PATH names the shards", "BYTES_DIR DATA_PATH_BASE"),
    _dead("the tokenizer and the byte sidecar show whether CaseOps is used", "CASEOPS_ENABLED"),
    _dead("the run folder has the checkpoints", "CHECKPOINT_DIR"),
    _dead("the recipe's run.checkpoint_every says how often", "CHECKPOINT_EVERY"),
    _dead("no churn of ternary weights is logged", "CHURN_LOG_EVERY"),
    _dead("train.compile says whether steps are compiled", "COMPILE_MODE"),
    _dead("birdie codes the file with its own entropy coder", "COMPRESSOR USE_LZMA USE_ZSTD"),
    _dead("shards are read from disk, not loaded", "COPRIME_MAX_LOADED_SHARDS"),
    _dead("the number of shards in a step grows during training", "COPRIME_SHARDS_PER_BATCH"),
    _dead("every step draws its shards again", "COPRIME_SHARD_HOLD_STEPS"),
    _dead("DATA_PATH and TOKENIZER_PATH name data and tokenizer", "DATASETS_DIR DATA_DIR"),
    _dead("gates are stored like other small matrices", "GATED_ATTN_QUANT_GATE"),
    _dead("CALIBRATION_TOKENS says how much text calibration reads", "GPTQ_NUM_SEQS"),
    _dead("only the decoded artifact is scored", "POST_GPTQ_EVAL_ONLY"),
    _dead("SEED is the seed", "SEED_DEFAULT"),
    _dead("TRAIN_SEQ_LEN is the length of training sequences", "SEQ_LEN"),
    _dead("SEQ_LEN_START and SEQ_SCHEDULE_FRACTION are the schedule of lengths", "SEQ_LEN_SCHEDULE"),
    _dead("code and model together are held to the challenge's 16,000,000 bytes", "TARGET_MB"),
    _dead("TOKENIZER_PATH names the tokenizer", "TOKENIZER"),
    _dead("birdie builds no extension of torch", "TORCH_EXT"),
    _dead("the shards in DATA_PATH are used", "TRAIN_COUNT VAL_COUNT"),
    _dead("the scheme of the export says whether errors are fed back (GPTQ)", "USE_GPTQ"),
)
"""Variables of the records' commands that have no effect, and why."""


def settings(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the settings that the variables of this module make, by table; `content` has the recipe file's tables."""
    tables = _choices(environ, content)
    for rule in RULES:
        if any(name in environ for name in rule.variables):
            _merge(tables, rule.read(environ, content))
    return tables


def variables_of(setting: str) -> list[str]:
    """Return the variables of this module that are set and may have set `setting`, as TABLE.SETTING."""
    switches = [name for name, (model_setting, _) in CHOICES.items() if f"model.{model_setting}" == setting]
    joint = [name for rule in RULES if setting in rule.settings for name in rule.variables]
    names = [name for name in dict.fromkeys([*switches, *joint]) if name in os.environ]
    return [name for name in names if name.lower() == setting.rpartition(".")[2]] or names


def _merge(tables: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the settings `more` to `tables`, in place."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(tables.setdefault(name, {}), value)
        else:
            tables[name] = value


def remarks(environ: Environment) -> Iterator[str]:
    """Yield a line for the variables in `environ` that have no effect, one for each reason."""
    for dead in DEAD:
        if names := dead.active_variables(environ):
            yield f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {dead.reason}"
    averages = [name for name, kind in AVERAGES.items() if _averaging(environ, kind)]
    for name in averages[1:]:
        yield f"{name} has no effect: a run has one average, and {averages[0]} takes precedence, as in the records"


def is_on(value: str) -> bool:
    """Return True for the value of a variable that turns something on: not 0, empty, "none", "false" or "off"."""
    try:
        return float(value) != 0
    except ValueError:
        return value.strip().lower() not in OFF


def _switch(environ: Environment, name: str) -> bool:
    value = environ.get(name, "0").strip().lower()
    if value not in ("0", "1", "false", "true", ""):
        raise ConfigError(f"{name} is {environ[name]!r}; it is a switch; give 1 or 0")
    return value in ("1", "true")


def _number(environ: Environment, name: str, default: float) -> float:
    value: float = _read(environ, name, float, default)
    return value


def _integer(environ: Environment, name: str, default: int) -> int:
    value: int = _read(environ, name, int, default)
    return value


def _read(environ: Environment, name: str, hint: Any, default: Any) -> Any:
    if name not in environ:
        return default
    try:
        return parsed(environ[name], hint)
    except ConfigError as error:
        raise ConfigError(f"{name} is {environ[name]!r}; {error}") from None


def _choices(environ: Environment, content: Mapping[str, Any]) -> Tables:
    model: dict[str, Any] = {}
    for name, (setting, word) in CHOICES.items():
        if name not in environ:
            continue
        if _switch(environ, name):
            if model.get(setting, word) not in (word, "none"):
                raise ConfigError(f"{name} sets {setting} to {word}, another switch to {model[setting]}; set one")
            model[setting] = word
        elif content.get("model", {}).get(setting) == word:
            model.setdefault(setting, "none")  # a switch that is off cancels only its own choice in the file
    return {"model": model} if model else {}


def _value_embedding(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the layers with value embeddings: VE_ENABLED=0 overrides VE_LAYERS; VE_LAYERS alone turns them on."""
    if "VE_ENABLED" in environ and not _switch(environ, "VE_ENABLED"):
        return {"model": {"value_embed_layers": []}}
    if "VE_LAYERS" in environ:
        return {"model": {"value_embed_layers": list(_read(environ, "VE_LAYERS", tuple[int, ...], ()))}}
    in_file = content.get("model", {}).get("value_embed_layers")
    return {} if in_file else {"model": {"value_embed_layers": [int(layer) for layer in VALUE_LAYERS.split(",")]}}


def _qat(environ: Environment, _: Mapping[str, Any]) -> Tables:
    """Return QAT of the blocks at 6 bits, from the first step or below a learning-rate multiplier (late QAT)."""
    name = "LATE_QAT_THRESHOLD" if "LATE_QAT_THRESHOLD" in environ else "QAT_THRESHOLD"
    below = _number(environ, name, LATE)
    early, late = _switch(environ, "QAT_ENABLED"), below > 0
    if "LATE_QAT" in environ:
        late = late and _switch(environ, "LATE_QAT")
    elif name not in environ:
        late = False
    if not (early or late):
        return {}
    start = {} if early else {"below": below}
    return {"qat": {"bits": 6, "tensors": ["blocks.*"], **start}}


def _averaging(environ: Environment, kind: str) -> bool:
    """Return whether `environ` turns on this average: by its switch, or EMA by its decay alone, as in later records."""
    switch = next(name for name, word in AVERAGES.items() if word == kind)
    if switch in environ:
        return _switch(environ, switch)
    return kind == "ema" and _number(environ, "EMA_DECAY", 0) > 0 and not any(name in environ for name in AVERAGES)


def _average(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the first average that is on; a switch that is off cancels only its own kind in the file."""
    values: dict[str, Any] = {}
    if "EMA_DECAY" in environ:
        values["ema_decay"] = _number(environ, "EMA_DECAY", 0)
    in_file = content.get("average", {}).get("kind", "none")
    on = [kind for kind in AVERAGES.values() if _averaging(environ, kind)]
    if on:
        values["kind"] = on[0]
    elif any(name in environ and kind == in_file for name, kind in AVERAGES.items()):
        values["kind"] = "none"
    return {"average": values}


def _ternary(environ: Environment, _: Mapping[str, Any]) -> Tables:
    group = _integer(environ, "BITNET_GROUP_SIZE", 0)
    if group < 1:
        return {}
    return {"qat": {"levels": "ternary", "group_size": group, "tensors": ["blocks.*"]}}


def _sliding(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the stride: a switch that is on uses the records' default if no stride is set, one that is off sets 0."""
    switches = [name for name in ("SLIDING_WINDOW_ENABLED", "SLIDING_EVAL") if name in environ]
    if not all(_switch(environ, name) for name in switches):
        return {"evaluation": {"stride": 0}}
    strides = [name for name in ("EVAL_STRIDE", "SLIDING_EVAL_STRIDE") if name in environ]
    in_file = content.get("evaluation", {}).get("stride") or STRIDE
    return {"evaluation": {"stride": _integer(environ, strides[0], STRIDE) if strides else in_file}}


def _scoring_mode(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the mode of test-time training: LoRA if one of its variables is set, else the file's mode, else SGD.

    LoRA is from parameter-golf#1530, SGD from parameter-golf#549 (github.com/openai/parameter-golf/pull/549).
    """
    in_file = content.get("evaluation", {}).get("mode", "windows")
    trains = in_file.startswith("ttt-")
    switched = "TTT_ENABLED" in environ
    if switched and not _switch(environ, "TTT_ENABLED"):
        return {"evaluation": {"mode": "windows"}} if trains else {}
    if _switch(environ, "PHASED_TTT_ENABLED"):
        return {"evaluation": {"mode": "ttt-multi-phase"}}
    mode = "ttt-lora" if "PHASED_TTT_ENABLED" in environ and in_file == "ttt-multi-phase" else in_file
    if switched and (mode == "ttt-sgd" or not trains):
        mode = "ttt-lora" if any(name in environ for name in (*ADAPTERS, *PARTS)) else "ttt-sgd"
    return {"evaluation": {"mode": mode}} if mode != in_file else {}


def _adapted_parts(environ: Environment, content: Mapping[str, Any]) -> Tables:
    in_file = content.get("evaluation", {}).get("ttt_lora", {}).get("parts", [*PARTS.values(), "head"])
    on = {part: _switch(environ, name) for name, part in PARTS.items() if name in environ}
    parts = [part for part in [*PARTS.values(), "head"] if on.get(part, part in in_file)]
    return {"evaluation": {"ttt_lora": {"parts": parts}}}


def _renamed(variable: str, table: str, setting: str) -> VariableRule:
    """Return the rule of a variable that is one setting of a mode's table."""

    def read(environ: Environment, _: Mapping[str, Any]) -> Tables:
        return {"evaluation": {table: {setting: environ[variable]}}}

    return VariableRule((variable,), (f"evaluation.{table}.{setting}",), read)


def _gptq(setting: str, bits: str, sigmas: str) -> Callable[[Environment, Mapping[str, Any]], Tables]:
    """Return a reader of the variables `bits` and `sigmas`, which make the GPTQ spec of an export setting."""

    def read(environ: Environment, _: Mapping[str, Any]) -> Tables:
        width = _integer(environ, bits, BITS.get(setting, 6))
        clip = _number(environ, sigmas, CLIP_SIGMAS.get(setting, 12.85))
        return {"export": {setting: f"gptq:bits={width},clip_sigmas={clip:g}"}}

    return read


def _calibration(environ: Environment, _: Mapping[str, Any]) -> Tables:
    return {"calibration": {"data": "train"}} if _integer(environ, "GPTQ_CALIBRATION_BATCHES", 0) > 0 else {}


def _reserve(environ: Environment, _: Mapping[str, Any]) -> Tables:
    return {"calibration": {"reserve_seconds": _number(environ, "GPTQ_RESERVE_MS", 0) / 1000}}


def _fp16_embedding(environ: Environment, _: Mapping[str, Any]) -> Tables:
    return {"export": {"embedding": "fp16"}} if _switch(environ, "FP16_EMBED_EXPORT") else {}


def _mlp_width(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Return the width of the MLP as a multiple of the model's, which another variable or the file may set."""
    hidden = _integer(environ, "MLP_HIDDEN", 0)
    width = _integer(environ, "MODEL_DIM", content.get("model", {}).get("model_dim", MODEL_DIM))
    return {"model": {"mlp_mult": hidden / width}} if hidden > 0 < width else {}


RULES = (
    VariableRule(("VE_LAYERS", "VE_ENABLED"), ("model.value_embed_layers",), _value_embedding),
    VariableRule((*AVERAGES, "EMA_DECAY"), ("average.kind", "average.ema_decay"), _average),
    VariableRule(
        ("QAT_ENABLED", "LATE_QAT", "LATE_QAT_THRESHOLD", "QAT_THRESHOLD"),
        ("qat.bits", "qat.below", "qat.tensors"),
        _qat,
    ),
    VariableRule(("BITNET_GROUP_SIZE",), ("qat.levels", "qat.group_size", "qat.tensors"), _ternary),
    VariableRule(
        ("EMBED_BITS", "EMBED_CLIP_SIGMAS"),
        ("export.embedding",),
        _gptq("embedding", "EMBED_BITS", "EMBED_CLIP_SIGMAS"),
    ),
    VariableRule(
        ("MATRIX_BITS", "MATRIX_CLIP_SIGMAS"),
        ("export.scheme",),
        _gptq("scheme", "MATRIX_BITS", "MATRIX_CLIP_SIGMAS"),
    ),
    VariableRule(("ATTN_CLIP_SIGMAS",), ("export.attention",), _gptq("attention", "MATRIX_BITS", "ATTN_CLIP_SIGMAS")),
    VariableRule(("MLP_CLIP_SIGMAS",), ("export.mlp",), _gptq("mlp", "MATRIX_BITS", "MLP_CLIP_SIGMAS")),
    VariableRule(("FP16_EMBED_EXPORT",), ("export.embedding",), _fp16_embedding),
    VariableRule(("MLP_HIDDEN",), ("model.mlp_mult",), _mlp_width),
    VariableRule(("SLIDING_WINDOW_ENABLED", "SLIDING_EVAL"), ("evaluation.stride",), _sliding),
    VariableRule(("TTT_ENABLED", "PHASED_TTT_ENABLED"), ("evaluation.mode",), _scoring_mode),
    VariableRule(tuple(PARTS), ("evaluation.ttt_lora.parts",), _adapted_parts),
    *(_renamed(f"TTT_{name.upper()}", "ttt_sgd", name) for name in (*SGD, "freeze_blocks")),
    *(_renamed(f"GLOBAL_TTT_{name.upper()}", "ttt_multi_phase", name) for name in SGD),
    VariableRule(("GPTQ_CALIBRATION_BATCHES",), ("calibration.data",), _calibration),
    VariableRule(("GPTQ_RESERVE_MS",), ("calibration.reserve_seconds",), _reserve),
)
