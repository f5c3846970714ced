"""Running a foreign script, in the sandbox and nowhere else, to see whether it runs and what its scorer does.

    run_script(path) ──► sandbox: load ──► GPT: builds small, predicts, is causal        runs, causal
                                      └──► score() or scorer(): probes                  causal, normalised, one-pass
                                      └──► log of opened files and of sockets           self-contained, size

The script is loaded as a module, so what stands under `if __name__ == "__main__"` does not run. A script lets itself
be probed by offering one of these at its top level, and the size of its vocabulary as `VOCABULARY` (or as
`Hyperparameters.vocab_size`):

    def score(tokens):      array of N + 1 ids ──► N losses in nats, one for each target tokens[1:]; each call is a
                            run of its own and begins anew
    def scorer():           a new object with predict() ──► log-probabilities of the next token (vocabulary,), and
                            reveal(token), called with each token in turn after its prediction, the first without one

Probes call `score` some hundred times on short streams of random tokens; make it small for them, not for the record.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.names import TRAINING_FILE
from birdie.golf.audit.probes import CLOSE, probe, probe_losses
from birdie.golf.audit.rules import CAUSAL, RUNS, SELF_CONTAINED, SIZE, Finding, Verdict
from birdie.golf.audit.sandbox import GIB, INSIDE, OvertimeError, RefusedError, Sandbox, SandboxError

BY = "run"
CAP_BYTES = 16_000_000
LENGTH = 64
"""Tokens the model predicts in the smoke test."""
TOKENS = 129
"""Tokens of the stream for probes."""
MOST_VOCABULARY = 2**22
"""Largest vocabulary that is probed; none in use comes near it."""

_LARGE = 2**63  # no size is


@dataclass(frozen=True, slots=True)
class _About:
    """What the script has, by what was sent out of the sandbox, which the script may have forged."""

    seconds: float
    score: bool
    scorer: bool
    model: bool
    vocabulary: int | None

    @classmethod
    def read(cls, said: object) -> Self:
        """Raises SandboxError: it is no such answer."""
        match said:
            case {
                "seconds": float(seconds),
                "score": bool(score),
                "scorer": bool(scorer),
                "model": bool(model),
                "vocabulary": int() | None as vocabulary,
            }:
                return cls(seconds, score, scorer, model, vocabulary)
        raise SandboxError("the script spoke out of turn: what it sent is no answer")


@dataclass(frozen=True, slots=True)
class _Made:
    """What its model did, as sent."""

    shape: tuple[int, int, int]
    vocabulary: int
    finite: bool
    parameters: int
    leak: float
    shrunk: bool

    @classmethod
    def read(cls, said: object) -> Self:
        """Raises SandboxError: it is no such answer."""
        match said:
            case {
                "shape": [int(first), int(second), int(third)],
                "vocabulary": int(vocabulary),
                "finite": bool(finite),
                "parameters": int(parameters),
                "leak": float(leak),
                "shrunk": bool(shrunk),
            } if max(map(abs, (first, second, third, vocabulary, parameters))) < _LARGE:
                return cls((first, second, third), vocabulary, finite, parameters, leak, shrunk)
        raise SandboxError("the script spoke out of turn: what it sent is no answer")


def run_script(path: Path, *, seconds: float = 120, memory: int = 4 * GIB) -> tuple[Finding, ...]:
    """Run the script at `path` in the sandbox, for up to `seconds` and with `memory` bytes; findings about it.

    Where there is no sandbox the answer is "unknown".
    """
    shown = str(path)
    code = path.stat().st_size
    findings: list[Finding] = []
    try:
        with Sandbox(path, seconds=seconds, memory=memory) as box:
            try:
                about = _About.read(box.ask("load"))
                findings += _loaded(about, code, shown)
                if about.model:
                    findings += _smoke(box, shown)
                probed = _probed(box, about, shown)
                findings += probed
            except OvertimeError as error:
                return (*findings, Finding(RUNS, "unknown", f"not done: {error}", BY, shown))
            except SandboxError as error:
                findings.append(_stopped(error, shown))
                probed = []
            scored = any(each.rule != RUNS for each in probed)
            findings += _read(box, path, code, scored, shown)
    except RefusedError as error:
        return (Finding(RUNS, "unknown", f"it was not run, for want of a sandbox: {error}", BY, shown),)
    except SandboxError as error:
        findings.append(Finding(RUNS, "unknown", f"the rest is not known: {error}", BY, shown))
    return tuple(findings)


def _loaded(about: _About, code: int, shown: str) -> list[Finding]:
    offers = [name for name, offered in (("score", about.score), ("scorer", about.scorer)) if offered]
    told = f"it loads in {about.seconds:.1f} s on a CPU, {code:,} bytes of code"
    if offers:
        return [Finding(RUNS, "pass", f"{told}, and offers {' and '.join(offers)} to probes", BY, shown)]
    if about.model:
        return []
    return [Finding(RUNS, "unknown", f"{told}; it has no class GPT and offers neither score() nor scorer()", BY, shown)]


def _stopped(error: SandboxError, shown: str) -> Finding:
    if error.kind in ("ModuleNotFoundError", "ImportError"):
        return Finding(RUNS, "unknown", f"what it imports is not installed here: {error}", BY, shown)
    if error.kind == "SystemExit":
        why = f"it runs, and ends, when it is loaded ({error}); what it does belongs under if __name__ == '__main__'"
        return Finding(RUNS, "unknown", why, BY, shown)
    return Finding(RUNS, "fail", f"it does not load on a CPU: {error}", BY, shown)


def _smoke(box: Sandbox, shown: str) -> list[Finding]:
    """Its model, built small."""
    try:
        made = _Made.read(box.ask("model", LENGTH))
    except OvertimeError:
        raise
    except SandboxError as error:
        why = f"its GPT could not be built and asked from its Hyperparameters alone: {error}"
        return [Finding(RUNS, "unknown", why, BY, shown)]
    vocabulary, shape = made.vocabulary, made.shape
    if shape[:2] != (1, LENGTH) or shape[2] < vocabulary or not made.finite:
        finite = "finite" if made.finite else "not finite"
        why = f"its GPT predicts {shape}, {finite}, for {LENGTH} tokens of a vocabulary of {vocabulary}"
        return [Finding(RUNS, "fail", why, BY, shown)]
    small = "built small" if made.shrunk else "built"
    why = f"its GPT, {small} with {made.parameters:,} parameters, predicts {shape}, finite"
    findings = [Finding(RUNS, "pass", why, BY, shown)]
    leak = made.leak
    told = f"its untrained GPT's predictions change by {leak:.1e} when only later tokens do"
    # an untrained model that passes proves little: its scorer is another matter
    findings.append(Finding(CAUSAL, "fail" if leak > CLOSE else "unknown", told, BY, shown))
    return findings


def _probed(box: Sandbox, about: _About, shown: str) -> list[Finding]:
    """The entry points it offers, probed."""
    if not (about.score or about.scorer):
        return []
    vocabulary = about.vocabulary
    if vocabulary is None or vocabulary < 2:
        return [Finding(RUNS, "unknown", "it says no VOCABULARY, so it was not probed", BY, shown)]
    if vocabulary > MOST_VOCABULARY:
        why = f"its VOCABULARY is more than {MOST_VOCABULARY:,}, so it was not probed"
        return [Finding(RUNS, "unknown", why, BY, shown)]
    tokens = np.random.default_rng(0).integers(0, vocabulary, TOKENS)
    found: tuple[Finding, ...] = ()
    if about.score:

        def losses(stream: NDArray[np.int64]) -> NDArray[np.float64]:
            return np.array(_numbers(box.ask("score", stream.tolist())))

        found += probe_losses(losses, vocabulary, tokens)
    if about.scorer:
        found += probe(lambda: _Proxy(box), vocabulary, tokens)
    if box.over:
        raise OvertimeError(f"its scorer did not finish in {box.seconds:g} s")
    return [Finding(each.rule, each.verdict, each.evidence, each.by, shown) for each in found]


class _Proxy:
    """A scorer that is in the sandbox; one at a time."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        box.ask("begin")

    def predict(self) -> Tensor:
        return torch.tensor(_numbers(self._box.ask("predict")), dtype=torch.float64)

    def reveal(self, token: int) -> None:
        self._box.ask("reveal", token)


def _numbers(said: object) -> list[float]:
    if not isinstance(said, list) or not all(isinstance(each, int | float) for each in said):
        raise SandboxError("the script spoke out of turn: what it sent are no numbers")
    try:
        return [float(each) for each in said]
    except OverflowError as error:
        raise SandboxError("the script spoke out of turn: what it sent are no numbers") from error


def _read(box: Sandbox, path: Path, code: int, scored: bool, shown: str) -> list[Finding]:
    """What it opened, and whether it reached for the network."""
    log = box.log()
    own = (path.resolve(), INSIDE.resolve())
    files = {each: size for each, size in log.opened.items() if each not in own and each.suffix != ".pyc"}
    training = [each for each in files if TRAINING_FILE.search(each.name) and each.suffix != ".py"]
    total = code + sum(files.values())
    named = ", ".join(f"{each.name} ({size:,})" for each, size in sorted(files.items(), key=lambda f: -f[1])[:5])
    opened = f"{len(files)} files of {sum(files.values()):,} bytes were opened" + (f": {named}" if named else "")
    findings = []
    if log.tried:
        why = f"it reached for the network {len(log.tried)} times, first: {log.tried[0]}"
        findings.append(Finding(SELF_CONTAINED, "fail", why, BY, shown))
    if training:
        why = f"it opened training data, {training[0].name} first of {len(training)}"
        findings.append(Finding(SELF_CONTAINED, "fail", why, BY, shown))
    if not findings:
        end = "scoring" if scored else "loading it alone"
        verdict: Verdict = "pass" if scored else "unknown"
        why = f"in {end} no socket was tried and no training data opened; {opened}"
        findings.append(Finding(SELF_CONTAINED, verdict, why, BY, shown))
    over = total > CAP_BYTES
    why = f"{code:,} bytes of code and {total - code:,} of files it opened make {total:,}, the cap is {CAP_BYTES:,}"
    findings.append(Finding(SIZE, "fail" if over else "pass" if scored else "unknown", why, BY, shown))
    return findings
