"""The records' environment variables that are more, or less, than one setting by another name.

A variable that is a setting stands on its field (`env_var`). Here is the rest, and nowhere else: switches that are one
word of a choice here, variables that only together make a setting, those of a dataclass that two tables have, what is
not here yet, and what needs no setting.
They rank with the other variables: below flags, above the recipe file. What is in none of these is not looked at, for
environments hold everything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from birdie.errors import ConfigError

Environment = Mapping[str, str]
Tables = dict[str, dict[str, Any]]

OFF = ("", "0", "none", "false", "off")
BITS, DEVIATIONS = {"embedding": 8, "scheme": 6}, {"embedding": 20.0, "scheme": 12.85}  # the records' defaults
LATE = 0.15  # of the learning rates, below which late QAT is on
VALUE_LAYERS = "9,10"
STRIDE = 64  # of sliding windows

CHOICES = {
    "SMEAR": ("smear", "fixed"),
    "SMEAR_GATE_ENABLED": ("smear", "gated"),
    "ATTN_OUT_GATE_ENABLED": ("attn_gate", "output"),
    "GATED_ATTN_ENABLED": ("attn_gate", "dense"),
    "GATED_ATTENTION": ("attn_gate", "dense"),
    "SPARSE_ATTN_GATE_ENABLED": ("attn_gate", "sparse"),
}
"""Switch → the setting of `[model]` and the word of it that the switch stands for."""

AVERAGES = {"LAWA_ENABLED": "lawa", "EMA_ENABLED": "ema", "SWA_ENABLED": "swa"}
"""Switch → kind of average. Of several the first that is on is taken: #549 has LAWA before EMA, and SWA unused."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Variables that make settings together.

    Attributes:
        variables: any of them calls for the rule.
        settings: what it may set, as TABLE.SETTING.
        read: (environment, tables of the recipe file) → settings by table.
    """

    variables: tuple[str, ...]
    settings: tuple[str, ...]
    read: Callable[[Environment, Mapping[str, Any]], Tables]


@dataclass(frozen=True, slots=True)
class Later:
    """A technique that is not here yet.

    Attributes:
        what: it is, as the beginning of "… not available".
        variables: that ask for it: one that is not off does.
        details: that say more of it, and ask for it only where none of `variables` is set.
        off: words that leave it off, beside the usual ones.
    """

    what: str
    variables: tuple[str, ...]
    details: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    def asked(self, environ: Environment) -> list[str]:
        """Those of its variables that ask for it."""
        mains = [name for name in self.variables if name in environ]
        if mains and not any(self._on(environ[name]) for name in mains):
            return []
        return [name for name in (*self.variables, *self.details) if name in environ and self._on(environ[name])]

    def _on(self, value: str) -> bool:
        return is_on(value) and value.strip().lower() not in self.off


ADAPTERS = (
    *("TTT_LORA_RANK", "TTT_LORA_LR", "TTT_LORA_ALPHA", "TTT_CHUNK_SIZE", "TTT_BATCH_SIZE"),
    *("TTT_BETA1", "TTT_BETA2", "TTT_WEIGHT_DECAY", "TTT_EVAL_SEQ_LEN", "TTT_WARM_START_A"),
)
"""Variables of the test-time training that learns adapters: beside them TTT_ENABLED means that, and not SGD."""

PARTS = {"TTT_Q_LORA": "q", "TTT_K_LORA": "k", "TTT_V_LORA": "v", "TTT_O_LORA": "o", "TTT_MLP_LORA": "mlp"}
"""Switch → the part it adapts; the head is always adapted."""

SGD = ("lr", "epochs", "chunk_tokens", "momentum", "batch_seqs", "grad_clip")
"""Settings of SGD at test time, which two scoring modes have, so that no name of a variable can stand on the field."""

LATER = (
    Later("fitting a temperature is", ("TEMP_SCALING",)),
    Later("fp8 storage is", ("FP_STORAGE",)),
    Later("prediction of several tokens is", ("MTP_NUM_HEADS", "MTP_HEADS"), ("MTP_LOSS_WEIGHT",)),
    Later("YaRN is", ("ROPE_TYPE", "ROPE_YARN"), ("YARN_MAX_LEN",), off=("rope",)),
    Later("steps of their own for attention and MLP are", ("ATTN_CLIP_SIGMAS", "MLP_CLIP_SIGMAS")),
    Later(
        "a low-rank correction of the tensors with the largest error is",
        ("LQER_ENABLED",),
        ("LQER_RANK", "LQER_TOP_K", "LQER_FACTOR_BITS", "LQER_ASYM_ENABLED", "LQER_ASYM_GROUP"),
    ),
)

NEEDLESS = {
    "CASEOPS_ENABLED": "the tokenizer's pieces and the byte sidecar say it",
    "COMPRESSOR": "the file is coded by birdie's own coder",
    "COPRIME_MAX_LOADED_SHARDS": "shards are mapped into memory, not loaded",
    "COPRIME_SHARDS_PER_BATCH": "how many shards a step mixes grows by itself",
    "COPRIME_SHARD_HOLD_STEPS": "every step draws its shards anew",
    "DATA_DIR": "DATA_PATH and TOKENIZER_PATH say where data and tokenizer are",
    "GATED_ATTN_QUANT_GATE": "gates are stored as small matrices are",
}
"""Variables of the records' commands for which there is nothing to set, and why."""


def settings(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """What `environ` sets beyond the fields' own variables, by table; `content` is the recipe file's.

    Raises:
        ConfigError: a switch is neither 0 nor 1, two that exclude one another are on, or a number is none.
    """
    tables = _choices(environ, content)
    for rule in RULES:
        if any(name in environ for name in rule.variables):
            _merge(tables, rule.read(environ, content))
    return tables


def _merge(tables: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add settings to `tables`, in place, table by table."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(tables.setdefault(name, {}), value)
        else:
            tables[name] = value


def remarks(environ: Environment) -> Iterator[str]:
    """A line for each technique that `environ` asks for and that is not here yet, or that needs no asking."""
    for later in LATER:
        asked = later.asked(environ)
        if asked:
            names = ", ".join(asked)
            verb = "is" if len(asked) == 1 else "are"
            yield f"{names} {verb} set, but {later.what} not available in this version; going on without"
    for name, why in NEEDLESS.items():
        if is_on(environ.get(name, "")):
            yield f"{name} sets nothing here: {why}"
    asked = [name for name, kind in AVERAGES.items() if _averaging(environ, kind)]
    for name in asked[1:]:
        yield f"{name} is set beside {asked[0]}, which outweighs it, as in the records: there is one average"


def is_on(value: str) -> bool:
    """Whether a variable of this value asks for anything: a number that is not 0, or a word that is not "none"."""
    try:
        return float(value) != 0
    except ValueError:
        return value.strip().lower() not in OFF


def _switch(environ: Environment, name: str) -> bool:
    value = environ.get(name, "0").strip().lower()
    if value not in ("0", "1", "false", "true", ""):
        raise ConfigError(f"{name} is {environ[name]!r}; it is a switch: give 1 or 0")
    return value in ("1", "true")


def _number(environ: Environment, name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise ConfigError(f"{name} is {environ[name]!r}; give a number") from None


def _choices(environ: Environment, content: Mapping[str, Any]) -> Tables:
    model: dict[str, Any] = {}
    for name, (setting, word) in CHOICES.items():
        if name not in environ:
            continue
        if _switch(environ, name):
            if model.get(setting, word) not in (word, "none"):
                raise ConfigError(f"{name} asks for {setting} {word}, but {model[setting]} is on already; give one")
            model[setting] = word
        elif content.get("model", {}).get(setting) == word:
            model.setdefault(setting, "none")  # a switch takes back its own word of the file, and no other
    return {"model": model} if model else {}


def _value_embedding(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """VE_ENABLED=0 outweighs VE_LAYERS, which is enough by itself."""
    if "VE_ENABLED" in environ and not _switch(environ, "VE_ENABLED"):
        return {"model": {"value_embed_layers": []}}
    if "VE_LAYERS" in environ:
        layers = [part.strip() for part in environ["VE_LAYERS"].split(",") if part.strip()]
        if not all(layer.isdecimal() for layer in layers):
            raise ConfigError(f"VE_LAYERS is {environ['VE_LAYERS']!r}; give numbers of layers: 9,10")
        return {"model": {"value_embed_layers": [int(layer) for layer in layers]}}
    held = content.get("model", {}).get("value_embed_layers")
    return {} if held else {"model": {"value_embed_layers": [int(layer) for layer in VALUE_LAYERS.split(",")]}}


def _qat(environ: Environment, _: Mapping[str, Any]) -> Tables:
    """Six bits for the blocks: from the first step, or late, when the learning rates have fallen so far."""
    below = _number(environ, "LATE_QAT_THRESHOLD", LATE)
    early, late = _switch(environ, "QAT_ENABLED"), below > 0
    if "LATE_QAT" in environ:
        late = late and _switch(environ, "LATE_QAT")
    elif "LATE_QAT_THRESHOLD" not in environ:
        late = False
    if not (early or late):
        return {}
    when = {} if early else {"below": below}
    return {"qat": {"bits": 6, "tensors": ["blocks.*"], **when}}


def _averaging(environ: Environment, kind: str) -> bool:
    """Whether `environ` asks for this average: by its switch, or EMA by its decay alone, as the later records do."""
    switch = next(name for name, word in AVERAGES.items() if word == kind)
    if switch in environ:
        return _switch(environ, switch)
    return kind == "ema" and _number(environ, "EMA_DECAY", 0) > 0 and not any(name in environ for name in AVERAGES)


def _average(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """The first that is on; a switch that is off takes back its own kind of the file."""
    values: dict[str, Any] = {}
    if "EMA_DECAY" in environ:
        values["ema_decay"] = _number(environ, "EMA_DECAY", 0)
    held = content.get("average", {}).get("kind", "none")
    on = [kind for kind in AVERAGES.values() if _averaging(environ, kind)]
    if on:
        values["kind"] = on[0]
    elif any(name in environ and kind == held for name, kind in AVERAGES.items()):
        values["kind"] = "none"
    return {"average": values}


def _ternary(environ: Environment, _: Mapping[str, Any]) -> Tables:
    group = int(_number(environ, "BITNET_GROUP_SIZE", 0))
    if group < 1:
        return {}
    return {"qat": {"levels": "ternary", "group_size": group, "tensors": ["blocks.*"]}}


def _fp8(environ: Environment, _: Mapping[str, Any]) -> Tables:
    return {"train": {"fp8": "on" if _switch(environ, "USE_FP8") else "off"}}


def _sliding(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """A switch that is on brings the records' stride where no other is given, one that is off takes every one back."""
    switches = [name for name in ("SLIDING_WINDOW_ENABLED", "SLIDING_EVAL") if name in environ]
    if not all(_switch(environ, name) for name in switches):
        return {"evaluation": {"stride": 0}}
    strides = [name for name in ("EVAL_STRIDE", "SLIDING_EVAL_STRIDE") if name in environ]
    held = content.get("evaluation", {}).get("stride") or STRIDE
    return {"evaluation": {"stride": int(_number(environ, strides[0], STRIDE)) if strides else held}}


def _scoring_mode(environ: Environment, content: Mapping[str, Any]) -> Tables:
    """Test-time training: LoRA (#1530) if one of its variables is set, else the file's mode, or else SGD (#549)."""
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


def _renamed(variable: str, table: str, setting: str) -> Rule:
    """Return the rule of a variable that is one setting of a mode's table."""

    def read(environ: Environment, _: Mapping[str, Any]) -> Tables:
        _number(environ, variable, 0)  # so that an error names the variable
        return {"evaluation": {table: {setting: environ[variable]}}}

    return Rule((variable,), (f"evaluation.{table}.{setting}",), read)


def _gptq(setting: str, bits: str, deviations: str) -> Callable[[Environment, Mapping[str, Any]], Tables]:
    """The spec of so many bits over so many standard deviations."""

    def read(environ: Environment, _: Mapping[str, Any]) -> Tables:
        width, k = _number(environ, bits, BITS[setting]), _number(environ, deviations, DEVIATIONS[setting])
        return {"export": {setting: f"gptq:bits={width:g},clip_sigmas={k:g}"}}

    return read


def _calibration(environ: Environment, _: Mapping[str, Any]) -> Tables:
    return {"calibration": {"data": "train"}} if _number(environ, "GPTQ_CALIBRATION_BATCHES", 0) > 0 else {}


RULES = (
    Rule(("VE_LAYERS", "VE_ENABLED"), ("model.value_embed_layers",), _value_embedding),
    Rule((*AVERAGES, "EMA_DECAY"), ("average.kind", "average.ema_decay"), _average),
    Rule(("QAT_ENABLED", "LATE_QAT", "LATE_QAT_THRESHOLD"), ("qat.bits", "qat.below", "qat.tensors"), _qat),
    Rule(("USE_FP8",), ("train.fp8",), _fp8),
    Rule(("BITNET_GROUP_SIZE",), ("qat.levels", "qat.group_size", "qat.tensors"), _ternary),
    Rule(
        ("EMBED_BITS", "EMBED_CLIP_SIGMAS"),
        ("export.embedding",),
        _gptq("embedding", "EMBED_BITS", "EMBED_CLIP_SIGMAS"),
    ),
    Rule(
        ("MATRIX_BITS", "MATRIX_CLIP_SIGMAS"),
        ("export.scheme",),
        _gptq("scheme", "MATRIX_BITS", "MATRIX_CLIP_SIGMAS"),
    ),
    Rule(("SLIDING_WINDOW_ENABLED", "SLIDING_EVAL"), ("evaluation.stride",), _sliding),
    Rule(("TTT_ENABLED", "PHASED_TTT_ENABLED"), ("evaluation.mode",), _scoring_mode),
    Rule(tuple(PARTS), ("evaluation.ttt_lora.parts",), _adapted_parts),
    *(_renamed(f"TTT_{name.upper()}", "ttt_sgd", name) for name in (*SGD, "freeze_blocks")),
    *(_renamed(f"GLOBAL_TTT_{name.upper()}", "ttt_multi_phase", name) for name in SGD),
    Rule(("GPTQ_CALIBRATION_BATCHES",), ("calibration.data",), _calibration),
)
