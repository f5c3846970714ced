"""Length, batch and precision of a run."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.runtime.device import DtypeName
from birdie.train.precision import MULTIPLE, Fp8


def comma_separated(_: Any, value: str, delimiter: str | None = None) -> list[str]:
    """How lists are written in the challenge's environment: "9,10"."""
    return [part for part in value.replace(delimiter or ",", ",").split(",") if part.strip()]


def nearest_divisor(value: int, whole: int) -> int:
    """The divisor of `whole` that is nearest to `value`, the larger of two."""
    return min((each for each in range(whole, 0, -1) if whole % each == 0), key=lambda each: abs(each - value))


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Length, batch and precision of a run; the defaults are the challenge's.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    iterations: Annotated[int, Parameter(env_var="ITERATIONS", help="Most steps of the run.")] = 20_000
    warmdown_iters: Annotated[
        int, Parameter(env_var="WARMDOWN_ITERS", help="Steps over which the learning rate falls to 0 at the end.")
    ] = 1200
    warmdown_fraction: Annotated[
        float | None, Parameter(env_var=("WARMDOWN_FRAC", "WARMDOWN_FRACTION"), help="The same as a share of the run.")
    ] = None
    min_lr: Annotated[
        float, Parameter(env_var="MIN_LR", help="Floor of the learning rates, as a share of their peaks.")
    ] = 0.0
    force_stop_step: Annotated[
        int,
        Parameter(env_var="FORCE_STOP_STEP", help="Last step of run and schedule, whatever the clock; 0: none."),
    ] = 0
    warmup_steps: Annotated[
        int, Parameter(env_var="WARMUP_STEPS", help="Steps that prime caches and compiler and are then undone.")
    ] = 20
    train_batch_tokens: Annotated[
        int, Parameter(env_var="TRAIN_BATCH_TOKENS", help="Tokens of a step over all ranks.")
    ] = 524_288
    train_seq_len: Annotated[int, Parameter(env_var="TRAIN_SEQ_LEN", help="Tokens of a training sequence.")] = 1024
    max_wallclock_seconds: Annotated[
        float, Parameter(env_var="MAX_WALLCLOCK_SECONDS", help="Limit on training time; 0: none.")
    ] = 600.0
    seed: Annotated[int, Parameter(env_var="SEED", help="Decides initial weights and batches.")] = 1337
    accumulation: Annotated[
        int, Parameter(help="Spans a step is cut into over all ranks; the number of ranks divides it.")
    ] = 8
    micro_batch_tokens: Annotated[
        int | Literal["auto"],
        Parameter(help="Tokens through the model at once; 0: a span; auto: as many as memory takes, by measurement."),
    ] = 0
    seq_len_start: Annotated[
        int, Parameter(env_var="SEQ_LEN_START", help="First length of sequences, which doubles in stages; 0: the full.")
    ] = 0
    seq_schedule_fraction: Annotated[
        float, Parameter(env_var="SEQ_SCHEDULE_FRACTION", help="Share of the run after which sequences are full.")
    ] = 0.33
    mixed_seq_lens: Annotated[
        tuple[int, ...],
        Parameter(
            env_var="MIXED_SEQ_LENS",
            env_var_split=comma_separated,
            negative=(),
            help="Lengths of sequences that the spans of a step, and so the ranks, have in turn; none given: the full.",
        ),
    ] = ()
    batch_tokens_start: Annotated[
        int, Parameter(env_var="BATCH_TOKENS_START", help="Tokens of the first steps, doubling in stages; 0: the full.")
    ] = 0
    batch_schedule_fraction: Annotated[
        float, Parameter(env_var="BATCH_SCHEDULE_FRACTION", help="Share of the run after which batches are full.")
    ] = 0.33
    compute_dtype: Annotated[
        DtypeName, Parameter(help="Dtype of activations; auto: bfloat16 where it is fast, else float32.")
    ] = "auto"
    fp8: Annotated[
        Fp8, Parameter(help="Products of the blocks in fp8: on, where the GPU has it; emulate: anywhere, slowly; off.")
    ] = "off"
    fused: Annotated[
        bool, Parameter(env_var="FUSED_CE_ENABLED", help="Softcap and loss in one piece where that is to be had.")
    ] = True
    fused_mlp: Annotated[
        bool, Parameter(help="Products and ReLU² of the MLPs in one Triton kernel, where that runs; not tuned.")
    ] = False
    compile: Annotated[bool | None, Parameter(help="Use torch.compile; default: on CUDA, where it pays.")] = None

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
            raise ConfigError(f"min_lr is {self.min_lr}; it is a share of the learning rates, from 0 to 1")
        if self.force_stop_step > self.iterations:
            raise ConfigError(
                f"force_stop_step {self.force_stop_step} is beyond the {self.iterations} iterations of the run; "
                "raise iterations or leave it out"
            )
        if not 0 <= self.max_wallclock_seconds < math.inf:
            raise ConfigError(f"max_wallclock_seconds is {self.max_wallclock_seconds}; give seconds, or 0 for no limit")
        if self.train_batch_tokens % (self.accumulation * self.train_seq_len):
            raise ConfigError(
                f"train_batch_tokens {self.train_batch_tokens} is not a whole number of sequences of "
                f"{self.train_seq_len} in each of {self.accumulation} spans; "
                f"choose a multiple of {self.accumulation * self.train_seq_len}"
            )
        if self.fp8 not in ("off", "on", "emulate"):
            raise ConfigError(f"fp8 is {self.fp8!r}; choose off, on or emulate")
        if self.fp8 != "off" and self.train_seq_len % MULTIPLE:
            raise ConfigError(
                f"fp8 needs sequences of a multiple of {MULTIPLE} tokens, not {self.train_seq_len}; "
                "change train_seq_len, or turn fp8 off"
            )
        self._check_growth()

    def _check_growth(self) -> None:
        span = self.train_batch_tokens // self.accumulation
        if self.seq_len_start and (self.seq_len_start < 1 or self.train_seq_len % self.seq_len_start):
            raise ConfigError(
                f"seq_len_start {self.seq_len_start} does not divide train_seq_len {self.train_seq_len}; choose "
                f"{nearest_divisor(self.seq_len_start, self.train_seq_len)}, or 0 for the full length throughout"
            )
        if not 0 <= self.batch_tokens_start <= self.train_batch_tokens or self.batch_tokens_start % span:
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is not a number of spans; choose a multiple of "
                f"{span} up to {self.train_batch_tokens}, or a larger accumulation"
            )
        if self.batch_tokens_start and self.accumulation % self.spans_start:
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is {self.spans_start} spans of {span} tokens, which do "
                f"not divide the {self.accumulation} of a step; choose "
                f"{nearest_divisor(self.spans_start, self.accumulation) * span}, or 0 for the full batch throughout"
            )
        self._check_mixed(span)
        for name in ("seq_schedule_fraction", "batch_schedule_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        size = self.micro_batch_tokens
        if isinstance(size, str):
            if size != "auto":
                raise ConfigError(f"micro_batch_tokens is {size!r}; give a number of tokens, 0, or auto")
        elif size < 0 or size % self.train_seq_len or (size and span % size and size % span):
            raise ConfigError(
                f"micro_batch_tokens {size} does not cut spans of {span} tokens; choose whole sequences of "
                f"{self.train_seq_len} that divide a span, or whole spans"
            )

    def _check_mixed(self, span: int) -> None:
        lengths = self.mixed_seq_lens
        for length in lengths:
            if length < 1 or self.train_seq_len % length:
                raise ConfigError(
                    f"mixed_seq_lens has {length}, which does not divide train_seq_len {self.train_seq_len}; choose "
                    f"{nearest_divisor(length, self.train_seq_len)}, or make train_seq_len the longest of them"
                )
        if lengths and self.accumulation % len(lengths):
            raise ConfigError(
                f"mixed_seq_lens has {len(lengths)} lengths for {self.accumulation} spans of a step, which cannot "
                "have them equally often; choose an accumulation that is a multiple of their number"
            )
        if lengths and self.spans_start % len(lengths):
            raise ConfigError(
                f"batch_tokens_start {self.batch_tokens_start} is {self.spans_start} spans, too few for each of the "
                f"{len(lengths)} mixed_seq_lens as often; choose a multiple of {len(lengths) * span}"
            )

    @property
    def spans_start(self) -> int:
        """Spans of the first steps, over all ranks."""
        return self.batch_tokens_start * self.accumulation // self.train_batch_tokens or self.accumulation

    @property
    def cap_ms(self) -> float | None:
        """The wall-clock limit in milliseconds, or None: without one, or where the last step is forced."""
        return None if self.force_stop_step else 1000 * self.max_wallclock_seconds or None

    @property
    def last_step(self) -> int:
        """Most steps of the run: those it has unless the clock ends it."""
        return self.force_stop_step or self.iterations

    def forced_stop(self, train_ms: float) -> str | None:
        """What to say of a run that ended after `train_ms` at a forced last step; None where it was not forced."""
        if not self.force_stop_step:
            return None
        cap, took = self.max_wallclock_seconds, train_ms / 1000
        over = f", beyond the cap of {cap:g} s that a submission must keep" if cap and took > cap else ""
        return f"forced last step: {self.force_stop_step:,}, reached after {took:.1f} s{over}"
