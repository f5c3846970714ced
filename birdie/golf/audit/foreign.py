"""Execution of a foreign script, in the sandbox and nowhere else: does it run, and what does its scorer do?

    run_script(path) ──► sandbox: load ──► GPT: builds small; its logits are judged here   runs, causal
                                      └──► score() or scorer(): probes                     causal, normalised, one-pass
                     ──► files of its folder that it opened, as the kernel reports them    self-contained, size

The script is loaded as a module, so the part under `if __name__ == "__main__"` does not run. A script can be probed if
it offers one of these at its top level, and the size of its vocabulary as `VOCABULARY` (or as
`Hyperparameters.vocab_size`):

    def score(tokens):      array of N + 1 ids ──► N losses in nats, one for each target tokens[1:]; each call is a
                            run of its own
    def scorer():           a new object with predict() ──► log-probabilities of the next token (vocabulary,), and
                            reveal(token), called with each token in turn after its prediction, the first without one

Probes call `score` some hundred times on short streams of random tokens; make it small for them, not for the record.
"""

import base64
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.probes import CLOSE, probe, probe_losses
from birdie.golf.audit.rules import CAUSAL, RUNS, SELF_CONTAINED, SIZE, Finding, Result, Rule, size_result
from birdie.golf.audit.sandbox import GIB, InterferedError, LimitError, RefusedError, Sandbox, SandboxError
from birdie.golf.audit.script import TRAINING_FILE
from birdie.runtime.regular import require_regular

MODEL_TOKENS = 64
"""Tokens that the model predicts in the smoke test."""
PROBE_TOKENS = 129
MAX_VOCABULARY = 2**22
"""Largest vocabulary that is probed; none in use comes near it."""


def run_script(path: Path, *, seconds: float = 120, memory: int = 4 * GIB) -> tuple[Finding, ...]:
    """Run the script at `path` in the sandbox, for up to `seconds` and with `memory` bytes; return findings about it.

    Where there is no sandbox the script is not run, and the result is "unknown".
    """
    require_regular(path)
    run = _Run(path)
    try:
        with Sandbox(path, seconds=seconds, memory=memory) as box:
            run.all_of(box)
    except RefusedError as error:
        run.findings.clear()
        run.add(RUNS, "unknown", f"the script was not run, for want of a sandbox: {error}")
    except SandboxError as error:
        run.add(RUNS, "unknown", f"the run did not finish: {error}")
    return tuple(run.findings)


class _Run:
    """The findings of one run; answers come from foreign code and may be forged, so their form is checked."""

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self.findings: list[Finding] = []
        self.scored = False

    def add(self, rule: Rule, result: Result, evidence: str) -> None:
        self.findings.append(Finding(rule, result, evidence, "run", self.shown))

    def all_of(self, box: Sandbox) -> None:
        """Load the script, try its model, probe its scorer, and look at what it opened."""
        evidence = f"run in a sandbox ({box.description}) without network; it tells nothing of a script that knows the "
        self.add(RUNS, "unknown", f"{evidence}probes and behaves otherwise, nor of one that breaks the kernel")
        try:
            started = time.perf_counter()
            offers = _fields(box, box.ask("load"), score=bool, scorer=bool, model=bool)
            entries = [name for name in ("score", "scorer") if offers[name]]
            evidence = (
                f"it loads in {time.perf_counter() - started:.1f} s on a CPU, {box.snapshot.size:,} bytes of code"
            )
            if entries:
                self.add(RUNS, "pass", f"{evidence}, and offers {' and '.join(entries)} to probes")
            elif not offers["model"]:
                self.add(RUNS, "unknown", f"{evidence}; it has no class GPT and offers neither score() nor scorer()")
            if offers["model"]:
                self.smoke_test(box)
            if entries:
                self.probe(box, entries, offers.get("vocabulary"))
        except (LimitError, InterferedError):
            raise
        except SandboxError as error:
            self.failed(error)
        self.judge_files(box)

    def failed(self, error: SandboxError) -> None:
        """Add the finding of a script that raised an exception."""
        if error.kind in ("ModuleNotFoundError", "ImportError"):
            self.add(RUNS, "unknown", f"a module that it imports is not installed: {error}")
        elif error.kind == "SystemExit":
            evidence = f"it exits when it is loaded ({error}); its main part belongs under if __name__ == '__main__'"
            self.add(RUNS, "unknown", evidence)
        else:
            self.add(RUNS, "fail", f"it does not load on a CPU: {error}")

    def smoke_test(self, box: Sandbox) -> None:
        """Build the script's GPT small, and judge its logits: for some tokens, then with others in the second half."""
        try:
            model = _fields(box, box.ask("model", MODEL_TOKENS), vocabulary=int, parameters=int, shrunk=bool)
            vocabulary, half = model["vocabulary"], MODEL_TOKENS // 2
            if not 2 <= vocabulary <= MAX_VOCABULARY:
                self.add(RUNS, "unknown", f"its GPT has no vocabulary of 2 to {MAX_VOCABULARY:,}, so it was not probed")
                return
            if not 0 <= model["parameters"] < 2**63:
                raise box.interfered()
            tokens = np.random.default_rng(0).integers(0, vocabulary, MODEL_TOKENS)
            shape, first = _logits(box, tokens)
            tokens[half:] = (tokens[half:] + 1) % vocabulary
            changed_shape, second = _logits(box, tokens)
        except (LimitError, InterferedError):
            raise
        except SandboxError as error:
            self.add(RUNS, "unknown", f"its GPT could not be built from its Hyperparameters alone, or run: {error}")
            return
        is_finite = bool(np.isfinite(first).all() and np.isfinite(second).all())
        finite = "finite" if is_finite else "not finite"
        if shape != changed_shape or shape[:2] != (1, MODEL_TOKENS) or shape[2] < vocabulary or not is_finite:
            evidence = f"its GPT predicts {shape}, {finite}, for {MODEL_TOKENS} tokens of a vocabulary of {vocabulary}"
            self.add(RUNS, "fail", evidence)
            return
        small = "built small" if model["shrunk"] else "built"
        evidence = f"its GPT, {small} with {model['parameters']:,} parameters, predicts {shape}, {finite}"
        self.add(RUNS, "pass", evidence)
        leak = float(np.abs(first.reshape(shape)[:, :half] - second.reshape(shape)[:, :half]).max())
        evidence = f"its untrained GPT's predictions change by {leak:.1e} when only later tokens do"
        # that an untrained model passes proves little: its scorer is another matter
        self.add(CAUSAL, "fail" if leak > CLOSE else "unknown", evidence)

    def probe(self, box: Sandbox, entries: list[str], vocabulary: object) -> None:
        """Probe the entry points that the script offers."""
        if not isinstance(vocabulary, int) or not 2 <= vocabulary <= MAX_VOCABULARY:
            evidence = f"its VOCABULARY is no number from 2 to {MAX_VOCABULARY:,}, so it was not probed"
            self.add(RUNS, "unknown", evidence)
            return
        tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)

        def losses(stream: NDArray[np.int64]) -> NDArray[np.float64]:
            return _numbers(box, box.ask("score", stream.tolist()))

        findings: tuple[Finding, ...] = ()
        if "score" in entries:
            findings += probe_losses(losses, vocabulary, tokens)
        if "scorer" in entries:
            findings += probe(lambda: _RemoteScorer(box), vocabulary, tokens)
        box.require_running()
        self.scored = any(finding.rule != RUNS for finding in findings)
        for finding in findings:
            self.findings.append(Finding(finding.rule, finding.result, finding.evidence, finding.check, self.shown))

    def judge_files(self, box: Sandbox) -> None:
        """Add which files of its folder the script opened. No others existed for it, and no network."""
        files, code = box.opened(), box.snapshot.size
        training = [path for path in files if TRAINING_FILE.search(Path(path).name) and not path.endswith(".py")]
        total = sum(files.values())
        scored: Result = "pass" if self.scored else "unknown"
        if training:
            evidence = f"it opened training data, {training[0]} first of {len(training)}"
            self.add(SELF_CONTAINED, "fail", evidence)
        else:
            largest = sorted(files.items(), key=lambda item: -item[1])[:5]
            names = ", ".join(f"{path} ({size:,})" for path, size in largest)
            evidence = f"{'scoring' if self.scored else 'loading alone'} had no network, and nothing but "
            evidence += f"{len(box.snapshot.files) + 1} files of its folder"
            evidence += f" ({box.snapshot.left} were left out)" if box.snapshot.left else ""
            evidence += f"; beside the script {len(files)} of {total:,} bytes were opened{': ' if names else ''}{names}"
            self.add(SELF_CONTAINED, scored, evidence)
        evidence = f"{code:,} bytes of code and {total:,} of files it opened"
        result, evidence = size_result(code + total, evidence, box.snapshot.listed)
        self.add(SIZE, scored if result == "pass" else result, evidence)


def _fields(box: Sandbox, answer: object, **kinds: type) -> dict[str, Any]:
    """Return an answer that has fields of these types."""
    if not isinstance(answer, dict) or not all(isinstance(answer.get(name), kind) for name, kind in kinds.items()):
        raise box.interfered()
    return answer


def _numbers(box: Sandbox, answer: object, kind: str = "<f8") -> NDArray[np.float64]:
    """Return the numbers in an answer, which are the base64 of a little-endian array."""
    try:
        if not isinstance(answer, str):
            raise TypeError
        return np.frombuffer(base64.b64decode(answer, validate=True), kind).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise box.interfered() from error


def _logits(box: Sandbox, tokens: NDArray[np.int64]) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Return the shape of the model's logits for some tokens, and the logits in a row."""
    answer = _fields(box, box.ask("logits", tokens.tolist()), shape=list, values=str)
    shape, values = tuple(answer["shape"]), _numbers(box, answer["values"], "<f4")
    if len(shape) != 3 or not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) != len(values):
        raise box.interfered()
    return shape, values


class _RemoteScorer:
    """The scorer inside the sandbox; one at a time."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        box.ask("begin")

    def predict(self) -> Tensor:
        return torch.from_numpy(_numbers(self._box, self._box.ask("predict")))

    def reveal(self, token: int) -> None:
        self._box.ask("reveal", token)
