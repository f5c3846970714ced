"""A recipe's scoring as one script: it decodes a .birdie file and scores it, and cannot train or export.

    recipe ─► which features ─► shaken modules ─► minified ─► context mixing ─► score.py
                                                                                   │ python, torchrun
    decode model.birdie, score as the challenge and as the recipe ◄── import ◄─────┘

Made as `birdie.golf.packed` makes the training script. A file says how its model computes; what this script leaves out
either has weights, so that a model with it does not fit, or refuses with a sentence.
"""

import ast
from collections.abc import Iterator

from birdie.golf import packed
from birdie.golf.packed import FEWER_KERNEL_FILES, Packed
from birdie.golf.shake import shake
from birdie.run.recipe import Recipe

_ENTRY = "birdie.cli.scoring_script"
_TECHNIQUES = "birdie.model.techniques"
_DECLARING = ("GPT", "Block", "Attention", "MLP")  # classes whose `techniques` only training and streaming read

# Bodies of functions that do more than this script needs: settings are those of a run, which has checked them.
_REPLACED = packed.DECODING | {
    ("birdie.run.evaluation", "load_gpt"): f"from {_ENTRY} import load_gpt as rebuilt\nreturn rebuilt(path, device)",
    ("birdie.run.evaluation", "_model_warnings"): "return ()",
    ("birdie.score.request", "EvaluationRequest.resolve"): (
        "settings = self.settings or recipe\nreturn settings, settings.scoring_mode"
    ),
    ("birdie.score.settings", "replaced"): (
        "return dataclasses.replace(settings, **{name: replaced(getattr(settings, name), value, path) "
        "if isinstance(value, Mapping) else tuple(value) if isinstance(value, list) else value "
        "for name, value in changes.items()})"
    ),
    ("birdie.runtime.kernels", "njit"): FEWER_KERNEL_FILES,
    ("birdie.data.dataset", "_check_by_decoding"): "return []",
    ("birdie.model.gpt", "GPT.diagnostics"): "return []",
}
_TOKENIZERS = ("ByteTokenizer", "SentencePieceTokenizer", "CaseOpsTokenizer")
_SKIPPED = (
    ("birdie.data.dataset", "DatasetInfo.write"),
    ("birdie.model.config", "GPTConfig.__post_init__"),
    ("birdie.model.initialization", "orthogonal_init_"),
    ("birdie.model.initialization", "overtone_init_"),
    ("birdie.score.mode", "ScoringSettings.__post_init__"),
    ("birdie.score.mode", "NgramSettings.__post_init__"),
    ("birdie.score.request", "EvaluationRequest.__post_init__"),
    ("birdie.score.settings", "EvaluationSettings.__post_init__"),
    ("birdie.score.settings", "EvaluationSettings.check"),
    ("birdie.score.modes", "StreamingMode.__post_init__"),
    ("birdie.score.modes", "StreamingMode.check"),
    ("birdie.score.modes", "LoRAMode.__post_init__"),
    ("birdie.score.modes", "LoRAMode.check"),
    ("birdie.score.modes", "MultiPhaseMode.__post_init__"),
    ("birdie.score.modes", "MultiPhaseMode.check"),
    ("birdie.score.modes", "SGDSettings.__post_init__"),
    ("birdie.score.ttt.sgd", "SGDTrainer.state"),
    ("birdie.score.ttt.sgd", "SGDTrainer.load_state"),
    ("birdie.score.ttt.multi_phase", "SGDPhases.state"),
    ("birdie.score.ttt.multi_phase", "SGDPhases.load_state"),
    ("birdie.score.ttt.lora", "_save"),
    ("birdie.score.ttt.lora", "_load"),
    ("birdie.entropy.prediction", "RowPrediction.subtract"),
    ("birdie.entropy.prediction", "TapPrediction.add"),
    ("birdie.entropy.prediction", "TapPrediction.subtract"),
    ("birdie.score.accumulator", "Accumulator.state"),
    ("birdie.score.accumulator", "Accumulator.load_state"),
    ("birdie.score.ttt.state", "identity"),
    ("birdie.score.ttt.state", "save_state"),
    ("birdie.score.ttt.state", "loaded_state"),
    *(("birdie.data.tokenizer", f"{kind}.{name}") for kind in _TOKENIZERS for name in ("encode_batch", "decode")),
    ("birdie.data.tokenizer", "ByteTokenizer.encode"),
)
_NEVER = (
    ("birdie.entropy.static", "decode_lanes"),
    ("birdie.score.package", "PackagedModel"),
    ("birdie.score.package", "for_scoring"),
    ("birdie.score.request", "StateFile"),
    ("birdie.entropy.prediction", "TapPrediction.take"),  # of convolutions
)


def pack_scoring(recipe: Recipe) -> Packed:
    """Return the script that scores files of `recipe`: the same birdie and recipe give the same bytes.

    Raises:
        ConfigError: a scheme of the recipe is not one of birdie's.
    """
    modules = packed.compressed(_modules(recipe))
    return packed.assemble(modules, f"from {_ENTRY} import main\nmain({recipe.scores_twice})\n")


def _modules(recipe: Recipe) -> dict[str, ast.Module]:
    schemes = sorted(packed.schemes_of(recipe))
    cut = {pair for pair in packed.unused(recipe) if pair[0].startswith("birdie.score")}
    off = dict(_off(recipe))
    return shake(
        [(_ENTRY, "main"), (_ENTRY, "load_gpt"), *((scheme, "DECODER") for scheme in schemes)],
        cut=sorted({*cut, *_NEVER, *(pair for pair, body in off.items() if not body)}),
        replaced=dict.fromkeys(_SKIPPED, "return None")
        | _REPLACED
        | {pair: body for pair, body in off.items() if body},
        typed={("birdie.score.settings", "EvaluationSettings")},
        unread={} if recipe.evaluation.mode == "streaming" else dict.fromkeys(_DECLARING, ("techniques",)),
        absent={"birdie.model.mlp_kernels"},  # of training
    )


def _off(recipe: Recipe) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((module, name), body) of the techniques that the model does not have; "" for a refusal."""
    model = recipe.model
    none_of = "@classmethod\ndef of(cls, config): return None"
    if not model.bigram_vocab_size:
        yield (f"{_TECHNIQUES}.ngram_embedding", "NgramEmbedding"), none_of
    if not model.value_embed_layers:
        yield (f"{_TECHNIQUES}.value_embedding", "ValueEmbedding"), none_of
    if model.smear == "none":
        yield (f"{_TECHNIQUES}.smear", "smear_of"), "return None"
    elif model.smear == "gated":
        yield (f"{_TECHNIQUES}.smear", "FixedSmear"), ""
    if model.parallel != "lanes":
        yield (f"{_TECHNIQUES}.parallel_residual", "stream_weights"), "return None, None"
        yield ("birdie.model.gpt", "GPT._run_on_two_streams"), ""
        yield ("birdie.model.block", "Block.branches"), ""
    if model.attn_gate == "none":
        yield (f"{_TECHNIQUES}.head_gate", "gate_weight"), "return None"
        yield (f"{_TECHNIQUES}.head_gate", "gates"), ""
    if not model.xsa_last_n:
        yield (f"{_TECHNIQUES}.exclusive_attention", "remove_own_value"), ""
    if not model.value_residual:
        yield (f"{_TECHNIQUES}.value_residual", "mixing_weights"), "return None"
        yield (f"{_TECHNIQUES}.value_residual", "mix"), "return values"
    if not model.attn_window:
        yield ("birdie.model.documents", "banded_attention"), ""
    if recipe.evaluation.mode not in ("ttt-sgd", "ttt-multi-phase"):
        yield ("birdie.model.fused_loss", "capped_loss"), ""
    if recipe.evaluation.mode == "ttt-multi-phase":
        yield ("birdie.score.modes", "SGDMode.score"), ""
        yield ("birdie.score.modes", "SGDMode.describe"), ""
    if recipe.evaluation.ttt_lora.order == "fixed":
        yield ("birdie.runtime.distributed", "SharedCounter"), "def of(): ..."
