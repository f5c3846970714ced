"""Settings of a training run: length, batch and precision (`loop`), optimizers (`optimizers`), average (`average`).

They are separate from the code that acts on them, which imports torch: `birdie train --help` reads them alone.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from birdie.errors import ConfigError

CompileMode = Literal["default", "reduce-overhead"]
AverageKind = Literal["none", "ema", "swa", "lawa"]
Coefficients = Literal["classic", "polar_express"]
DtypeName = Literal["auto", "float32", "bfloat16"]
FP8_MULTIPLE = 16
"""Number that every dimension of an fp8 product must be a multiple of in hardware, the number of tokens included."""


RATES = ("matrix_lr", "tied_embed_lr", "embed_lr", "head_lr", "scalar_lr")
"""Learning rates of `OptimizerSettings`."""


def comma_separated(_: Any, value: str, delimiter: str | None = None) -> list[str]:
    """Split a list as the challenge's environment variables write it: "9,10"."""
    return [part for part in value.replace(delimiter or ",", ",").split(",") if part.strip()]


def nearest_divisor(value: int, number: int) -> int:
    """Return the divisor of `number` that is nearest to `value`, the larger of two."""
    divisors = (divisor for divisor in range(number, 0, -1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: abs(divisor - value))


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Length, batch and precision of a run; the defaults are the challenge's.

    A step is `accumulation` chunks of equal size over all ranks (gradient accumulation); ranks take chunks in turn. How
    many tokens go through the model at once is another question, which `micro_batch_tokens` answers.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    iterations: Annotated[int, Parameter(show=True, env_var="ITERATIONS", help="Most steps of the run.")] = 20_000
    warmdown_iters: Annotated[
        int, Parameter(env_var="WARMDOWN_ITERS", help="Steps over which the learning rate falls to 0 at the end.")
    ] = 1200
    warmdown_fraction: Annotated[
        float | None,
        Parameter(
            show=True,
            env_var=("WARMDOWN_FRAC", "WARMDOWN_FRACTION"),
            help="Fraction of the run, at its end, over which the learning rate falls to 0.",
        ),
    ] = None
    min_lr: Annotated[
        float, Parameter(env_var="MIN_LR", help="Floor of the learning rates, as a fraction of their peaks.")
    ] = 0.0
    force_stop_step: Annotated[
        int,
        Parameter(env_var="FORCE_STOP_STEP", help="Last step of run and schedule, whatever the clock; 0: none."),
    ] = 0
    warmup_steps: Annotated[
        int, Parameter(env_var="WARMUP_STEPS", help="Steps that warm up caches and compiler and are then undone.")
    ] = 20
    train_batch_tokens: Annotated[
        int, Parameter(show=True, env_var="TRAIN_BATCH_TOKENS", help="Tokens of a step over all ranks.")
    ] = 524_288
    train_seq_len: Annotated[
        int, Parameter(show=True, env_var="TRAIN_SEQ_LEN", help="Tokens of a training sequence.")
    ] = 1024
    max_wallclock_seconds: Annotated[
        float, Parameter(show=True, env_var="MAX_WALLCLOCK_SECONDS", help="Limit on training time; 0: none.")
    ] = 600.0
    seed: Annotated[int, Parameter(show=True, env_var="SEED", help="Seed of initial weights and batches.")] = 1337
    accumulation: Annotated[
        int, Parameter(help="Chunks of a step over all ranks; the number of ranks must divide it.")
    ] = 8
    micro_batch_tokens: Annotated[
        int | Literal["auto"],
        Parameter(help="Tokens through the model at once; 0: a chunk; auto: as many as memory allows, by measurement."),
    ] = 0
    seq_len_start: Annotated[
        int, Parameter(env_var="SEQ_LEN_START", help="Initial sequence length, which doubles in stages; 0: the full.")
    ] = 0
    seq_schedule_fraction: Annotated[
        float, Parameter(env_var="SEQ_SCHEDULE_FRACTION", help="Fraction of the run after which sequences are full.")
    ] = 0.33
    mixed_seq_lens: Annotated[
        tuple[int, ...],
        Parameter(
            env_var="MIXED_SEQ_LENS",
            env_var_split=comma_separated,
            negative=(),
            help="Sequence lengths that the chunks of a step, and so the ranks, have in turn; without any: the full.",
        ),
    ] = ()
    batch_tokens_start: Annotated[
        int,
        Parameter(env_var="BATCH_TOKENS_START", help="Tokens of the first steps, doubling in stages; 0: the full."),
    ] = 0
    batch_schedule_fraction: Annotated[
        float, Parameter(env_var="BATCH_SCHEDULE_FRACTION", help="Fraction of the run after which batches are full.")
    ] = 0.33
    compute_dtype: Annotated[
        DtypeName, Parameter(help="Dtype of activations; auto: bfloat16 where it is fast, else float32.")
    ] = "auto"
    fp8: Annotated[
        bool, Parameter(env_var="USE_FP8", help="Products of the blocks in fp8 by torchao, where the GPU has it.")
    ] = False
    fused: Annotated[
        bool, Parameter(env_var="FUSED_CE_ENABLED", help="Fuse softcap and loss where that is possible.")
    ] = True
    fused_mlp: Annotated[
        bool, Parameter(help="Products and ReLU² of the MLPs in one Triton kernel, where it runs; not tuned.")
    ] = False
    compile: Annotated[bool | None, Parameter(help="Use torch.compile; default: on CUDA, where it pays.")] = None
    compile_mode: Annotated[
        CompileMode, Parameter(help="Mode of torch.compile; reduce-overhead: as CUDA graphs, not measured yet.")
    ] = "default"

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to {2**63 - 1}")
        for name in ("iterations", "warmdown_iters", "warmup_steps", "force_stop_step"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("train_batch_tokens", "train_seq_len", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.warmdown_fraction is not None and not 0 <= self.warmdown_fraction <= 1:
            raise ConfigError(f"warmdown_fraction is {self.warmdown_fraction}; it must be from 0 to 1")
        if not 0 <= self.min_lr <= 1:
            raise ConfigError(f"min_lr is {self.min_lr}; it is a fraction of the learning rates, from 0 to 1")
        if self.force_stop_step > self.iterations:
            raise ConfigError(
                f"force_stop_step {self.force_stop_step} is beyond the {self.iterations} iterations of the run; "
                "raise iterations or leave it out"
            )
        if not 0 <= self.max_wallclock_seconds < math.inf:
            raise ConfigError(f"max_wallclock_seconds is {self.max_wallclock_seconds}; set seconds, or 0 for no limit")
        if self.train_batch_tokens % (self.accumulation * self.train_seq_len):
            raise ConfigError(
                f"train_batch_tokens {self.train_batch_tokens} is not a multiple of {self.accumulation} chunks of "
                f"sequences of {self.train_seq_len} tokens; choose a multiple of "
                f"{self.accumulation * self.train_seq_len}"
            )
        if self.compile_mode not in ("default", "reduce-overhead"):
            raise ConfigError(f"compile_mode is {self.compile_mode!r}; choose default or reduce-overhead")
        if self.fp8 and self.train_seq_len % FP8_MULTIPLE:
            raise ConfigError(
                f"fp8 needs sequences of a multiple of {FP8_MULTIPLE} tokens, not {self.train_seq_len}; "
                "change train_seq_len, or turn fp8 off"
            )
        self._check_schedules()
        self._check_mixed_lengths()
        for name in ("seq_schedule_fraction", "batch_schedule_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        self._check_micro_batches()

    def _check_schedules(self) -> None:
        chunk = self.chunk_tokens
        if self.seq_len_start and (self.seq_len_start < 1 or self.train_seq_len % self.seq_len_start):
            raise ConfigError(
                f"seq_len_start {self.seq_len_start} does not divide train_seq_len {self.train_seq_len}; choose "
                f"{nearest_divisor(self.seq_len_start, self.train_seq_len)}, or 0 for the full length throughout"
            )
        if not 0 <= self.batch_tokens_start <= self.train_batch_tokens or self.batch_tokens_start % chunk:
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is not a number of chunks; choose a multiple of "
                f"{chunk} up to {self.train_batch_tokens}, or a larger accumulation"
            )
        if self.batch_tokens_start and self.accumulation % self.initial_chunks:
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is {self.initial_chunks} chunks of {chunk} tokens, "
                f"which do not divide the {self.accumulation} of a step; choose "
                f"{nearest_divisor(self.initial_chunks, self.accumulation) * chunk}, or 0 for the full batch throughout"
            )

    def _check_mixed_lengths(self) -> None:
        lengths = self.mixed_seq_lens
        for length in lengths:
            if length < 1 or self.train_seq_len % length:
                raise ConfigError(
                    f"mixed_seq_lens has {length}, which does not divide train_seq_len {self.train_seq_len}; choose "
                    f"{nearest_divisor(length, self.train_seq_len)}, or make train_seq_len the longest of them"
                )
        if lengths and self.accumulation % len(lengths):
            raise ConfigError(
                f"mixed_seq_lens has {len(lengths)} lengths for {self.accumulation} chunks of a step, which cannot "
                "have them equally often; choose an accumulation that is a multiple of their number"
            )
        if lengths and self.initial_chunks % len(lengths):
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is {self.initial_chunks} chunks, too few for each of "
                f"the {len(lengths)} mixed_seq_lens equally often; choose a multiple of "
                f"{len(lengths) * self.chunk_tokens}"
            )

    def _check_micro_batches(self) -> None:
        size, chunk = self.micro_batch_tokens, self.chunk_tokens
        if isinstance(size, str):
            if size != "auto":
                raise ConfigError(f"micro_batch_tokens is {size!r}; set a number of tokens, 0, or auto")
        elif size < 0 or size % self.train_seq_len or (size and chunk % size and size % chunk):
            raise ConfigError(
                f"micro_batch_tokens {size} does not cut chunks of {chunk} tokens; choose whole sequences of "
                f"{self.train_seq_len} that divide a chunk, or whole chunks"
            )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a gradient-accumulation chunk."""
        return self.train_batch_tokens // self.accumulation

    @property
    def initial_chunks(self) -> int:
        """Chunks of the first steps, over all ranks."""
        return self.batch_tokens_start * self.accumulation // self.train_batch_tokens or self.accumulation

    @property
    def cap_ms(self) -> float | None:
        """The wall-clock limit in milliseconds, or None: without one, or where the last step is forced."""
        return None if self.force_stop_step else 1000 * self.max_wallclock_seconds or None

    @property
    def last_step(self) -> int:
        """The last step of the run, unless the clock ends it earlier."""
        return self.force_stop_step or self.iterations


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Learning rates, momenta and precision of the optimizers; the defaults are the challenge's.

    Raises:
        ConfigError: a value is out of range.
    """

    matrix_lr: Annotated[
        float, Parameter(show=True, env_var="MATRIX_LR", help="Muon's learning rate for the matrices of the blocks.")
    ] = 0.04
    tied_embed_lr: Annotated[float, Parameter(env_var="TIED_EMBED_LR", help="Learning rate of a tied embedding.")] = (
        0.05
    )
    embed_lr: Annotated[float, Parameter(env_var="EMBED_LR", help="Learning rate of an untied embedding.")] = 0.6
    head_lr: Annotated[float, Parameter(env_var="HEAD_LR", help="Learning rate of an untied output head.")] = 0.008
    scalar_lr: Annotated[
        float, Parameter(env_var="SCALAR_LR", help="Learning rate of gains, scales and skip weights.")
    ] = 0.04
    muon_momentum: Annotated[float, Parameter(env_var="MUON_MOMENTUM", help="Muon's momentum after warm-up.")] = 0.95
    muon_momentum_warmup_start: Annotated[
        float, Parameter(env_var="MUON_MOMENTUM_WARMUP_START", help="Muon's momentum at the first step.")
    ] = 0.85
    muon_momentum_warmup_steps: Annotated[
        int, Parameter(env_var="MUON_MOMENTUM_WARMUP_STEPS", help="Steps over which the momentum rises.")
    ] = 500
    muon_backend_steps: Annotated[int, Parameter(env_var="MUON_BACKEND_STEPS", help="Newton–Schulz iterations.")] = 5
    muon_coefficients: Annotated[
        Coefficients,
        Parameter(help="Coefficients of the Newton–Schulz polynomials: classic, or polar_express (others each step)."),
    ] = "classic"
    muon_row_normalize: Annotated[
        bool,
        Parameter(env_var=("MUON_ROW_NORMALIZE", "MUON_EQ_R"), help="Normalize rows before Newton–Schulz (MuonEq-R)."),
    ] = False
    muon_nesterov: Annotated[bool, Parameter(help="Muon uses Nesterov momentum.")] = True
    muon_beta2: Annotated[
        float,
        Parameter(env_var="MUON_BETA2", help="Decay of each row's mean square after Newton–Schulz (NorMuon); 0: none."),
    ] = 0.0
    muon_weight_decay: Annotated[
        float,
        Parameter(
            env_var=("MUON_WD", "MUON_WEIGHT_DECAY"),
            help="Decoupled weight decay of the matrices, times their learning rate.",
        ),
    ] = 0.0
    adam_weight_decay: Annotated[
        float,
        Parameter(
            env_var=("ADAM_WD", "ADAM_WEIGHT_DECAY"),
            help="Decoupled weight decay of all else, times its learning rate.",
        ),
    ] = 0.0
    embed_weight_decay: Annotated[
        float | None,
        Parameter(env_var="EMBED_WD", help="The same for the embeddings; default: adam_weight_decay."),
    ] = None
    decay_full: Annotated[
        float, Parameter(help="Fraction of the run up to which weight decay is at its full value; 1: to the end.")
    ] = 1.0
    decay_final: Annotated[float, Parameter(help="Factor on weight decay at the end, if it falls before.")] = 0.5
    newton_schulz_dtype: Annotated[
        DtypeName, Parameter(help="Dtype of Newton–Schulz; auto: bfloat16 where it is fast, else float32.")
    ] = "auto"
    beta1: Annotated[float, Parameter(env_var="BETA1", help="Adam's decay of the mean gradient.")] = 0.9
    beta2: Annotated[float, Parameter(env_var="BETA2", help="Adam's decay of the mean squared gradient.")] = 0.95
    adam_eps: Annotated[float, Parameter(env_var="ADAM_EPS", help="Adam's ε.")] = 1e-8
    grad_clip_norm: Annotated[
        float, Parameter(env_var="GRAD_CLIP_NORM", help="Largest norm of the gradient of all parameters; 0: no limit.")
    ] = 0.0

    def __post_init__(self) -> None:
        decays = ("muon_weight_decay", "adam_weight_decay", "embed_weight_decay")
        for name in (*RATES, *decays, "adam_eps", "grad_clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be a finite number of at least 0")
        for name in ("muon_momentum", "muon_momentum_warmup_start", "muon_beta2", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("muon_backend_steps", "muon_momentum_warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("decay_full", "decay_final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a fraction, from 0 to 1")
        if self.muon_coefficients not in ("classic", "polar_express"):
            raise ConfigError(f"muon_coefficients is {self.muon_coefficients!r}; choose classic or polar_express")


@dataclass(frozen=True, slots=True)
class AverageSettings:
    """Choice of the average of the weights that is the result of a run; without one, the last weights are."""

    kind: Annotated[
        AverageKind,
        Parameter(
            help="ema: exponential; swa: mean once the learning rates are low; lawa: mean of the last snapshots."
        ),
    ] = "none"
    ema_decay: Annotated[float, Parameter(help="Factor on the EMA at each step.")] = 0.997
    swa_every: Annotated[int, Parameter(env_var="SWA_EVERY", help="Steps between two terms of the SWA.")] = 50
    swa_below: Annotated[
        float, Parameter(env_var="SWA_START_FRAC", help="Factor on the learning rates below which SWA takes terms.")
    ] = 0.5
    lawa_k: Annotated[
        int, Parameter(env_var="LAWA_K", help="Snapshots that LAWA holds, each as large as the model.")
    ] = 10
    lawa_every: Annotated[int, Parameter(env_var="LAWA_FREQ", help="Steps between two snapshots of LAWA.")] = 100

    def __post_init__(self) -> None:
        if self.kind not in ("none", "ema", "swa", "lawa"):
            raise ConfigError(f"average kind is {self.kind!r}; choose none, ema, swa or lawa")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay is {self.ema_decay}; it must be at least 0 and below 1, such as 0.997")
        if not 0 < self.swa_below <= math.inf:
            raise ConfigError(
                f"swa_below is {self.swa_below}; it must be above 0; 2 takes terms from the first step on"
            )
        for name in ("swa_every", "lawa_k", "lawa_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def copies(self) -> int:
        """Copies of the weights in float32, at most."""
        return {"none": 0, "ema": 1, "swa": 1, "lawa": self.lawa_k}[self.kind]


@dataclass(frozen=True, slots=True)
class BanditSettings:
    """Factors on the learning rates among which a bandit chooses during training; off by default."""

    every: Annotated[
        int, Parameter(help="Steps between two choices of a factor on the learning rates (experimental); 0: never.")
    ] = 0
    factors: Annotated[tuple[float, ...], Parameter(negative=(), help="Factors to choose from.")] = (0.7, 1.0, 1.4)
    discount: Annotated[float, Parameter(help="Factor on the weight of all earlier choices at each choice.")] = 0.98

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"bandit every is {self.every}; it must be 0 (never) or a number of steps")
        if len(self.factors) < 2 or len(set(self.factors)) < len(self.factors):
            raise ConfigError(f"bandit factors are {self.factors}; set two or more different ones")
        if not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"bandit factors are {self.factors}; each must be finite and above 0")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"bandit discount is {self.discount}; it must be above 0, up to 1")

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON restores them."""
        return {**dataclasses.asdict(self), "factors": list(self.factors)}


@dataclass(frozen=True, slots=True)
class TrainingTables:
    """Settings of a training.

    Attributes:
        train: length, batch, precision, schedules.
        optimizer: learning rates and momenta.
        average: of the weights, which is the result in place of the last ones.
        bandit: varies the learning rates beside their schedule.
    """

    train: TrainSettings
    optimizer: OptimizerSettings
    average: AverageSettings = field(default_factory=AverageSettings)
    bandit: BanditSettings = field(default_factory=BanditSettings)
