"""Every variable of the records' commands is a setting, is logged as not supported, or needs no setting."""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from birdie.errors import ConfigError
from birdie.gpt.run.environment import CHOICES, DEAD, RULES, remarks
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import Recipe
from tests.conftest import challenge_variables

ROOT = Path(__file__).resolve().parents[3]
OTHERS = {"NCCL_NET", "OMP_NUM_THREADS", "RUN_ID", "EVAL_ONLY_PATH"}  # read by NCCL, by PyTorch and by the entry point

TENTH_LAYER = """
RUN_ID=tenth VOCAB_SIZE=1024 MAX_WALLCLOCK_SECONDS=600 VAL_LOSS_EVERY=200 TRAIN_LOG_EVERY=50 NUM_LAYERS=10
MATRIX_LR=0.02 SCALAR_LR=0.02 TIED_EMBED_LR=0.03 INT4_LAYERS=3,4,5,6 INT4_STEP=4
"""
LEAKY = """
NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=1536 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997 SWA_ENABLED=1 SWA_EVERY=50
ROPE_DIMS=16 LN_SCALE=1 LATE_QAT=1 LATE_QAT_THRESHOLD=0.15 VE_ENABLED=1 VE_DIM=128 VE_LAYERS=9,10
TTT_ENABLED=1 TTT_LR=0.002 TTT_EPOCHS=3 TTT_CHUNK_TOKENS=32768 TTT_FREEZE_BLOCKS=0 TTT_MOMENTUM=0.9
TTT_BATCH_SEQS=32 TTT_GRAD_CLIP=1.0 MUON_WD=0.04 ADAM_WD=0.04 MATRIX_LR=0.025 SCALAR_LR=0.025 TIED_EMBED_LR=0.035
MUON_MOMENTUM=0.99 MUON_MOMENTUM_WARMUP_START=0.92 MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3500
ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600 EVAL_STRIDE=64 SEED=1337
"""
SIMPLE = "SEED=42 QK_GAIN_INIT=5.25 TTT_ENABLED=1 TTT_LR=0.005 TTT_EPOCHS=3"
BEST = """
DATA_DIR=./data VOCAB_SIZE=8192 DATA_PATH=./data/datasets/fineweb10B_sp8192_lossless_caps_caseops_v1_reserved
TOKENIZER_PATH=./data/tokenizers/fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model CASEOPS_ENABLED=1
ITERATIONS=20000 MAX_WALLCLOCK_SECONDS=600 PHASED_TTT_ENABLED=1 PHASED_TTT_PREFIX_DOCS=2500 PHASED_TTT_NUM_PHASES=3
EMBED_BITS=7 MATRIX_LR=0.026 MIN_LR=0.1 MLP_CLIP_SIGMAS=11.5 ATTN_CLIP_SIGMAS=13.0 EMBED_CLIP_SIGMAS=14.0
GRAD_CLIP_NORM=0.3 TTT_CHUNK_SIZE=48 WARMUP_STEPS=20 MUON_BACKEND_STEPS=5 GLOBAL_TTT_MOMENTUM=0.9 WARMDOWN_FRAC=0.85
BETA2=0.99 TTT_BETA2=0.99 TTT_WEIGHT_DECAY=0.5 TTT_LORA_RANK=80 SPARSE_ATTN_GATE_SCALE=0.5 GPTQ_RESERVE_SECONDS=0.5
GPTQ_CALIBRATION_BATCHES=16 VAL_LOSS_EVERY=0 GATED_ATTN_QUANT_GATE=1 SPARSE_ATTN_GATE_ENABLED=1 GATE_WINDOW=12
SMEAR_GATE_ENABLED=1 LQER_ENABLED=1 LQER_ASYM_ENABLED=1 LQER_RANK=4 LQER_FACTOR_BITS=4 LQER_ASYM_GROUP=64 LQER_TOP_K=3
FUSED_CE_ENABLED=1 COMPRESSOR=pergroup NCCL_NET=Socket SEED=42
"""
TERNARY = """
DATA_PATH=./data/datasets/fineweb10B_sp8192 TOKENIZER_PATH=./data/tokenizers/fineweb_8192_bpe.model VOCAB_SIZE=8192
BITNET_GROUP_SIZE=128 EMBED_DIM=254 NUM_LAYERS=10 MODEL_DIM=768 NUM_KV_HEADS=4 NUM_HEADS=8 MLP_MULT=4 ADAM_WD=0.05
MUON_BACKEND_STEPS=3 MUON_MOMENTUM=0.95 MUON_WD=0.0 MATRIX_LR=0.04 SCALAR_LR=0.02 TIED_EMBED_LR=0.02
WARMDOWN_FRACTION=0.2 LOGIT_SOFTCAP=10 QK_GAIN_INIT=2.25 ROPE_TYPE=yarn YARN_MAX_LEN=2048 ROPE_BASE=5000
BATCH_TOKENS_START=0 BATCH_SCHEDULE_FRACTION=0.33 TRAIN_BATCH_TOKENS=524288 TRAIN_SEQ_LEN=1024 SMEAR=0
ITERATIONS=10000 WARMUP_STEPS=5 MAX_WALLCLOCK_SECONDS=599 VAL_MAX_TOKENS=0 TIE_EMBEDDINGS=1 ACTIVATION=relu2
SOFTCAP_TYPE=poly SLIDING_EVAL=1 SLIDING_EVAL_STRIDE=16 SLIDING_BATCH_SIZE=256 TEMP_SCALING=1 FP_STORAGE=FP8
OMP_NUM_THREADS=1
"""
COMMANDS = {"tenth layer": TENTH_LAYER, "#549": LEAKY, "#1493": SIMPLE, "#1855": BEST, "ternary": TERNARY}
EXPECTED = {
    "tenth layer": {"model.num_layers": 10, "export.int4_layers": (3, 4, 5, 6), "validation.every": 200},
    "#549": {
        "model.bigram_vocab_size": 1536, "model.value_embed_layers": (9, 10), "qat.bits": 6, "qat.below": 0.15,
        "qat.tensors": ("blocks.*",), "train.warmdown_iters": 3500, "optimizer.muon_momentum": 0.99,
        "average.kind": "ema", "average.ema_decay": 0.997, "average.swa_every": 50, "evaluation.mode": "ttt-sgd",
        "evaluation.ttt_sgd.lr": 0.002, "evaluation.ttt_sgd.epochs": 3, "evaluation.ttt_sgd.chunk_tokens": 32768,
        "evaluation.ttt_sgd.batch_seqs": 32, "evaluation.ttt_sgd.grad_clip": 1.0,
        "evaluation.stride": 64,
    },
    "#1493": {
        "model.qk_gain_init": 5.25, "train.seed": 42, "evaluation.mode": "ttt-sgd", "evaluation.ttt_sgd.lr": 0.005,
    },
    "#1855": {
        "evaluation.mode": "ttt-multi-phase", "evaluation.ttt_multi_phase.prefix_docs": 2500,
        "evaluation.ttt_multi_phase.phases": 3, "evaluation.ttt_multi_phase.momentum": 0.9,
        "evaluation.ttt_lora.rank": 80, "evaluation.ttt_lora.beta2": 0.99, "evaluation.ttt_lora.weight_decay": 0.5,
        "evaluation.ttt_lora.chunk": 48,
        "model.attn_gate": "sparse", "model.sparse_gate_scale": 0.5, "model.smear": "gated",
        "train.warmdown_fraction": 0.85, "train.min_lr": 0.1, "export.embedding": "gptq:bits=7,clip_sigmas=14",
        "calibration.data": "train", "calibration.reserve_seconds": 0.5,
        "export.attention": "gptq:bits=6,clip_sigmas=13", "export.mlp": "gptq:bits=6,clip_sigmas=11.5",
    },
    "ternary": {
        "model.embed_dim": 254, "model.softcap": "poly", "model.smear": "none", "train.warmdown_fraction": 0.2,
        "qat.levels": "ternary", "qat.group_size": 128, "qat.tensors": ("blocks.*",), "evaluation.stride": 16,
        "evaluation.batch_seqs": 256,
    },
}  # fmt: skip
UNSUPPORTED = {
    "tenth layer": [],
    "#549": [],
    "#1493": [],
    "#1855": ["low-rank correction"],
    "ternary": ["temperature", "fp8 storage", "YaRN"],
}

RECORDS = """
    ADAM_LR ADAM_WEIGHT_DECAY ARTIFACT_DIR ATTN_PROJ_TYPE ATTN_RES ATTN_VARIANT BIGRAM_HASH
    BINARIZE_ACTIVATIONS BYTES_DIR CE_WEIGHT CHECKPOINT_DIR CHECKPOINT_EVERY CHURN_LOG_EVERY
    COMPILE_MODE CONV_SIZE CORR_WEIGHT_LR DATASETS_DIR DATA_PATH_BASE DETACH_TARGETS DIFF_ATTN
    DISABLE_LAYER0_ATTN D_CONV D_STATE EGGROLL_LAYERS EGGROLL_LOAD EGGROLL_LORA_RANK EGGROLL_LR
    EGGROLL_RANK EGGROLL_SIGMA EMA EMA_START_FRACTION EVAL_DEPTH_RECURRENCE EVAL_ONLY_PATH EVAL_OVERLAP
    EVAL_TEMP EXPAND EXPAND_V FITNESS_SHAPING FP16_EMBED_EXPORT GATED_ATTN_INIT_STD GATE_ATTN_OUT
    GATE_ATTN_SRC GATE_WIDTH GDN_CONV_SIZE GDN_EXPAND_V GDN_HEAD_DIM_RATIO GDN_LAYERS GPTQ_NUM_SEQS
    GPTQ_RESERVE_MS HEAD_DIM_RATIO HESSIAN_CLIP_LAMBDA HNET_LR_DIFF INT6_LAYER_END INT6_LAYER_START
    JEPA_PRETRAIN_FRAC JEPA_STEPS JEPA_WEIGHT LEGENDRE_DEGREE_ATTN LEGENDRE_DEGREE_FFN LEGENDRE_GROUPS
    LOGIT_HEAD_TYPE LOOP_PHASE2_AT LORA_RANK LR_SCHEDULE LR_WARMUP_STEPS MATRIX_OPTIMIZER MIXED_QUANT
    MLP_EVERY MLP_GROUPS MLP_HIDDEN MODE MUON_EQ_R MUON_WEIGHT_DECAY NGRAM_WITHIN_BETA NGRAM_WORD_BETA
    NUM_ATTN_LAYERS NUM_VIRTUAL_LAYERS N_INT6_LAYERS OUTER_LAYERS PARALLEL_RESIDUAL
    PARALLEL_RESIDUAL_START POP_SIZE POST_GPTQ_EVAL_ONLY PREDICTOR_HIDDEN_MULT PROJECTOR_TYPE QAT
    QAT_FRACTION QAT_INT6 QAT_THRESHOLD QUANT_BITS QUANT_BITS_EMBED RATIO_LOSS_WEIGHT RECUR_LAYERS
    RECUR_START_STEP REFINER REFINER_KERNEL REPEAT_UNTIE_MLP REPEAT_UNTIE_MLP_LAYERS SCALE_STORAGE
    SEED_DEFAULT SEQ_LEN SEQ_LEN_SCHEDULE SIGN_COMPRESS_REG SIGREG_LAMBDA SIGREG_SCHEDULE SMEAR_GATE
    SMEAR_GATE_WIDTH SPARSE_ATTN_GATE_INIT_STD TARGET_AVG_CHUNK_LEN TARGET_MB TEMP_CALIB TOKENIZER
    TORCH_EXT TRAINING_DEPTH_RECURRENCE TRAIN_COUNT TVERSKY_FEATURE_POOLS TVERSKY_MEMBERSHIP
    TVERSKY_NUM_FEATURES UNTIE_AT_FRACTION USE_BIGRAM_HASH USE_GPTQ USE_GRAM_NS USE_INT8_KERNEL USE_LZMA
    USE_TRITON_KERNEL USE_ZSTD VAL_COUNT WARMDOWN_SHAPE WEIGHT_DECAY XNOR_GROUP_SIZE
"""
"""Variables that commands of public records set, besides those above; not those of the operating system."""


def variables(command: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in command.split())


def joint_variables() -> Iterator[str]:
    yield from CHOICES
    for rule in RULES:
        yield from rule.variables


def dead_variables() -> Iterator[str]:
    for row in DEAD:
        yield from row.names


def resolved(monkeypatch: pytest.MonkeyPatch, command: str, file: Path | None = None, *flags: str) -> Recipe:
    for name, value in variables(command).items():
        monkeypatch.setenv(name, value)
    return load_recipe(file, flags)


def value(recipe: Recipe, setting: str) -> object:
    return attrgetter(setting)(recipe)


@pytest.mark.parametrize("record", COMMANDS)
def test_a_command_of_a_record_sets_its_recipe(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolved(monkeypatch, COMMANDS[record])
    assert {setting: value(recipe, setting) for setting in EXPECTED[record]} == EXPECTED[record]


@pytest.mark.parametrize("record", COMMANDS)
def test_every_variable_of_a_command_is_accounted_for(record: str) -> None:
    known = {*challenge_variables(Recipe), *joint_variables(), *dead_variables(), *OTHERS}
    assert set(variables(COMMANDS[record])) <= known


@pytest.mark.parametrize("record", COMMANDS)
def test_each_unsupported_technique_is_one_line_of_the_log(record: str) -> None:
    lines = [line for line in remarks(variables(COMMANDS[record])) if "not available" in line]
    assert len(lines) == len(UNSUPPORTED[record])
    for line, technique in zip(lines, UNSUPPORTED[record], strict=True):
        assert technique in line


@pytest.mark.parametrize("name", RECORDS.split())
def test_no_variable_of_a_record_passes_in_silence(name: str) -> None:
    sets = {*challenge_variables(Recipe), *joint_variables(), *OTHERS}
    assert name in sets or any(name in line for line in remarks({name: "7"}))


def test_schemes_of_attention_and_mlp_hold_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    export = resolved(monkeypatch, "ATTN_CLIP_SIGMAS=13 MLP_CLIP_SIGMAS=11.5 MATRIX_BITS=6").export
    assert export.pinned() == [
        ("blocks.*.attn.*", "gptq:bits=6,clip_sigmas=13"),
        ("blocks.*.mlp.*", "gptq:bits=6,clip_sigmas=11.5"),
    ]
    assert export.schemes() == [*export.pinned(), ("*", "gptq:bits=6,clip_sigmas=12.85")]


def test_the_average_without_effect_is_logged() -> None:
    assert list(remarks(variables("EMA_ENABLED=1 SWA_ENABLED=1 LAWA_ENABLED=0"))) == [
        "SWA_ENABLED has no effect: a run has one average, and EMA_ENABLED takes precedence, as in the records"
    ]
    assert list(remarks(variables("EMA_ENABLED=0 EMA_DECAY=0.997 SWA_ENABLED=1"))) == []


def test_a_switch_that_is_off_cancels_only_its_own_average_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[average]\nkind = "swa"\nswa_every = 7\n')
    kept = resolved(monkeypatch, "EMA_ENABLED=0", file).average
    assert (kept.kind, kept.swa_every) == ("swa", 7)
    assert resolved(monkeypatch, "SWA_ENABLED=0", file).average.kind == "none"
    assert resolved(monkeypatch, "SWA_ENABLED=0", file, "--average.kind", "lawa").average.kind == "lawa"


@pytest.mark.parametrize(
    ("command", "setting", "expected"),
    [
        ("VE_ENABLED=0 VE_LAYERS=7,8", "model.value_embed_layers", ()),
        ("VE_LAYERS=7,8", "model.value_embed_layers", (7, 8)),
        ("VE_ENABLED=1 NUM_LAYERS=11", "model.value_embed_layers", (9, 10)),
        ("EMA_ENABLED=1", "average.kind", "ema"),
        ("EMA_DECAY=0.9965", "average.kind", "ema"),
        ("EMA_DECAY=0.9965", "average.ema_decay", 0.9965),
        ("EMA_ENABLED=0 EMA_DECAY=0.9965", "average.kind", "none"),
        ("SWA_ENABLED=1 EMA_DECAY=0.9965", "average.kind", "swa"),
        ("SWA_ENABLED=1 SWA_EVERY=20 SWA_START_FRAC=0.4", "average.swa_below", 0.4),
        ("EMA_ENABLED=1 SWA_ENABLED=1", "average.kind", "ema"),
        ("EMA_ENABLED=1 LAWA_ENABLED=1 LAWA_K=5 LAWA_FREQ=20", "average.kind", "lawa"),
        ("LAWA_FREQ=20", "average.lawa_every", 20),
        ("FORCE_STOP_STEP=4945 MAX_WALLCLOCK_SECONDS=600", "train.last_step", 4945),
        ("FORCE_STOP_STEP=4945 MAX_WALLCLOCK_SECONDS=600", "train.cap_ms", None),
        ("SMEAR=1", "model.smear", "fixed"),
        ("ATTN_OUT_GATE_ENABLED=1 GATED_ATTN_ENABLED=0", "model.attn_gate", "output"),
        ("GATED_ATTENTION=1", "model.attn_gate", "dense"),
        ("QAT_ENABLED=1", "qat.below", None),
        ("QAT_ENABLED=1", "qat.bits", 6),
        ("QAT_ENABLED=0 LATE_QAT_THRESHOLD=0.1", "qat.below", 0.1),
        ("LATE_QAT=1", "qat.below", 0.15),
        ("LATE_QAT=0 LATE_QAT_THRESHOLD=0.1", "qat.bits", None),
        ("LATE_QAT_THRESHOLD=0", "qat.bits", None),
        ("EMBED_CLIP_SIGMAS=15", "export.embedding", "gptq:bits=8,clip_sigmas=15"),
        ("MATRIX_BITS=5", "export.scheme", "gptq:bits=5,clip_sigmas=12.85"),
        ("BITNET_GROUP_SIZE=0", "qat.levels", None),
        ("GPTQ_CALIBRATION_BATCHES=0", "calibration.data", "none"),
        ("EMBEDDING_DIM=64", "model.embed_dim", 64),
        ("VAL_BATCH_TOKENS=4096", "validation.batch_tokens", 4096),
    ],
)
def test_a_variable_changes_its_setting(
    command: str, setting: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value(resolved(monkeypatch, command), setting) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("SMEAR=2", "SMEAR is '2'; it is a switch; give 1 or 0"),
        ("SPARSE_ATTN_GATE_ENABLED=1 GATED_ATTN_ENABLED=1", "attn_gate"),
        ("EMA_ENABLED=yes", "EMA_ENABLED is 'yes'; it is a switch; give 1 or 0"),
        ("EMA_DECAY=slow", "EMA_DECAY is 'slow'; give a number"),
        ("EMA_DECAY=1", "ema_decay is 1.0; it must be at least 0 and below 1"),
        ("EMA_ENABLED=1 BITNET_GROUP_SIZE=128", "average ema of weights that train on ternary levels"),
        ("FORCE_STOP_STEP=30000", "force_stop_step 30000 is beyond the 20000 iterations"),
        ("MIN_LR=2", "min_lr is 2.0"),
        ("EMBED_BITS=seven", "EMBED_BITS is 'seven'; give an integer"),
        ("EMBED_BITS=12", "grid width 12 is out of range"),
        ("VE_LAYERS=last", "VE_LAYERS is 'last'"),
        ("VE_ENABLED=1", "layer 9, but the model has layers 0 to 8"),
    ],
)
def test_a_wrong_value_is_one_sentence(command: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(monkeypatch, command)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_variables_override_the_file_and_flags_override_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[model]\nattn_gate = "sparse"\nsmear = "fixed"\nvalue_embed_layers = [2]\n')
    model = resolved(monkeypatch, "SPARSE_ATTN_GATE_ENABLED=0 SMEAR_GATE_ENABLED=0 VE_ENABLED=1", file).model
    assert (model.attn_gate, model.smear, model.value_embed_layers) == ("none", "fixed", (2,))
    model = resolved(monkeypatch, "SMEAR_GATE_ENABLED=1", file, "--model.attn-gate", "dense").model
    assert (model.attn_gate, model.smear) == ("dense", "gated")


@pytest.mark.parametrize(
    ("command", "alone", "on_sgd", "on_phased"),
    [
        ("TTT_ENABLED=1", "ttt-sgd", "ttt-sgd", "ttt-multi-phase"),
        ("TTT_ENABLED=0", "windows", "windows", "windows"),
        ("TTT_LR=0.1 TTT_LORA_RANK=8", "windows", "ttt-sgd", "ttt-multi-phase"),
        ("TTT_ENABLED=1 TTT_LORA_RANK=8", "ttt-lora", "ttt-lora", "ttt-multi-phase"),
        ("TTT_ENABLED=1 TTT_K_LORA=0", "ttt-lora", "ttt-lora", "ttt-multi-phase"),
        ("PHASED_TTT_ENABLED=1", "ttt-multi-phase", "ttt-multi-phase", "ttt-multi-phase"),
        ("PHASED_TTT_ENABLED=0", "windows", "ttt-sgd", "ttt-lora"),
        ("TTT_ENABLED=1 PHASED_TTT_ENABLED=0 TTT_CHUNK_SIZE=48", "ttt-lora", "ttt-lora", "ttt-lora"),
        ("TTT_ENABLED=0 PHASED_TTT_ENABLED=1", "windows", "windows", "windows"),
    ],
)
def test_variables_select_the_mode_of_test_time_training(
    command: str, alone: str, on_sgd: str, on_phased: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.toml"
    for in_file, expected in (("windows", alone), ("ttt-sgd", on_sgd), ("ttt-multi-phase", on_phased)):
        file.write_text(f'[evaluation]\nmode = "{in_file}"\n')
        with monkeypatch.context() as fresh:
            assert resolved(fresh, command, file).evaluation.mode == expected, in_file


def test_switches_select_the_parts_that_lora_adapts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[evaluation.ttt_lora]\nparts = ["q", "head"]\n')
    for command, path, expected in (
        ("TTT_Q_LORA=0 TTT_V_LORA=0", None, ("k", "o", "mlp", "head")),
        ("TTT_K_LORA=1 TTT_Q_LORA=0", file, ("k", "head")),
        ("TTT_WARM_START_A=1", file, ("q", "head")),
    ):
        with monkeypatch.context() as fresh:
            assert resolved(fresh, command, path).evaluation.ttt_lora.parts == expected
    assert resolved(monkeypatch, "TTT_WARM_START_A=1 TTT_LORA_ALPHA=144").evaluation.ttt_lora.warm_a


def test_other_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    typos = "NUM_LAYER=3 SMEAR_GATE_ENABLE=1 TTT_ENABLE=1 EDITOR=vi"
    assert resolved(monkeypatch, typos) == Recipe()
    assert list(remarks(variables(typos))) == []
