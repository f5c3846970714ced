"""Execution of a foreign script, in the sandbox and nowhere else: does it run, and what does its scorer do?

    run_script(path) ──► sandbox: load ──► GPT: builds small, predicts, is causal        runs, causal
                                      └──► score() or scorer(): probes                  causal, normalised, one-pass
                                      └──► log of opened files and of sockets           self-contained, size

The script is loaded as a module, so the part under `if __name__ == "__main__"` does not run. A script can be probed if
it offers one of these at its top level, and the size of its vocabulary as `VOCABULARY` (or as
`Hyperparameters.vocab_size`):

    def score(tokens):      array of N + 1 ids ──► N losses in nats, one for each target tokens[1:]; each call is a
                            run of its own
    def scorer():           a new object with predict() ──► log-probabilities of the next token (vocabulary,), and
                            reveal(token), called with each token in turn after its prediction, the first without one

Probes call `score` some hundred times on short streams of random tokens; make it small for them, not for the record.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.probes import CLOSE, probe, probe_losses
from birdie.golf.audit.rules import CAP_BYTES, CAUSAL, RUNS, SELF_CONTAINED, SIZE, Finding, Result, Rule
from birdie.golf.audit.sandbox import CHILD, GIB, OvertimeError, RefusedError, Sandbox, SandboxError
from birdie.golf.audit.script import TRAINING_FILE

MODEL_TOKENS = 64
"""Tokens that the model predicts in the smoke test."""
PROBE_TOKENS = 129
MAX_VOCABULARY = 2**22
"""Largest vocabulary that is probed; none in use comes near it."""

_FORGED = "the script interfered: its answer has the wrong form"


def run_script(path: Path, *, seconds: float = 120, memory: int = 4 * GIB) -> tuple[Finding, ...]:
    """Run the script at `path` in the sandbox, for up to `seconds` and with `memory` bytes; return findings about it.

    Where there is no sandbox the script is not run, and the result is "unknown".
    """
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
        self.path, self.shown, self.code = path, str(path), path.stat().st_size
        self.findings: list[Finding] = []
        self.scored = False

    def add(self, rule: Rule, result: Result, evidence: str) -> None:
        self.findings.append(Finding(rule, result, evidence, "run", self.shown))

    def all_of(self, box: Sandbox) -> None:
        """Load the script, try its model, probe its scorer, and read the log."""
        try:
            offers = _fields(box.ask("load"), seconds=float, score=bool, scorer=bool, model=bool)
            entries = [name for name in ("score", "scorer") if offers[name]]
            evidence = f"it loads in {offers['seconds']:.1f} s on a CPU, {self.code:,} bytes of code"
            if entries:
                self.add(RUNS, "pass", f"{evidence}, and offers {' and '.join(entries)} to probes")
            elif not offers["model"]:
                self.add(RUNS, "unknown", f"{evidence}; it has no class GPT and offers neither score() nor scorer()")
            if offers["model"]:
                self.smoke_test(box)
            if entries:
                self.probe(box, entries, offers.get("vocabulary"))
        except OvertimeError:
            raise
        except SandboxError as error:
            self.failed(error)
        self.read_log(box)

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
        """Build the script's GPT small, and have it predict."""
        try:
            model = _fields(
                box.ask("model", MODEL_TOKENS),
                shape=list,
                vocabulary=int,
                finite=bool,
                parameters=int,
                leak=float,
                shrunk=bool,
            )
        except OvertimeError:
            raise
        except SandboxError as error:
            self.add(RUNS, "unknown", f"its GPT could not be built from its Hyperparameters alone, or run: {error}")
            return
        shape, vocabulary = model["shape"], model["vocabulary"]
        sizes = [*shape, vocabulary, model["parameters"]]
        if len(shape) != 3 or not all(isinstance(size, int) and abs(size) < 2**63 for size in sizes):
            raise SandboxError(_FORGED)
        finite = "finite" if model["finite"] else "not finite"
        if shape[:2] != [1, MODEL_TOKENS] or shape[2] < vocabulary or not model["finite"]:
            evidence = (
                f"its GPT predicts {tuple(shape)}, {finite}, for {MODEL_TOKENS} tokens of a vocabulary of {vocabulary}"
            )
            self.add(RUNS, "fail", evidence)
            return
        small = "built small" if model["shrunk"] else "built"
        evidence = f"its GPT, {small} with {model['parameters']:,} parameters, predicts {tuple(shape)}, {finite}"
        self.add(RUNS, "pass", evidence)
        evidence = f"its untrained GPT's predictions change by {model['leak']:.1e} when only later tokens do"
        # that an untrained model passes proves little: its scorer is another matter
        self.add(CAUSAL, "fail" if model["leak"] > CLOSE else "unknown", evidence)

    def probe(self, box: Sandbox, entries: list[str], vocabulary: object) -> None:
        """Probe the entry points that the script offers."""
        if not isinstance(vocabulary, int) or not 2 <= vocabulary <= MAX_VOCABULARY:
            evidence = f"its VOCABULARY is no number from 2 to {MAX_VOCABULARY:,}, so it was not probed"
            self.add(RUNS, "unknown", evidence)
            return
        tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)

        def losses(stream: NDArray[np.int64]) -> NDArray[np.float64]:
            return np.array(_numbers(box.ask("score", stream.tolist())))

        findings: tuple[Finding, ...] = ()
        if "score" in entries:
            findings += probe_losses(losses, vocabulary, tokens)
        if "scorer" in entries:
            findings += probe(lambda: _RemoteScorer(box), vocabulary, tokens)
        if box.expired:
            raise OvertimeError(f"its scorer did not finish in {box.seconds:g} s")
        self.scored = any(finding.rule != RUNS for finding in findings)
        for finding in findings:
            self.findings.append(Finding(finding.rule, finding.result, finding.evidence, finding.check, self.shown))

    def read_log(self, box: Sandbox) -> None:
        """Add what the script opened, and whether it reached for the network."""
        log = box.log()
        known = (self.path.resolve(), CHILD.resolve())
        files = {path: size for path, size in log.opened.items() if path not in known and path.suffix != ".pyc"}
        training = [path for path in files if TRAINING_FILE.search(path.name) and path.suffix != ".py"]
        total = sum(files.values())
        if log.network:
            evidence = f"it reached for the network {len(log.network)} times, first: {log.network[0]}"
            self.add(SELF_CONTAINED, "fail", evidence)
        if training:
            evidence = f"it opened training data, {training[0].name} first of {len(training)}"
            self.add(SELF_CONTAINED, "fail", evidence)
        if not log.network and not training:
            largest = sorted(files.items(), key=lambda item: -item[1])[:5]
            names = ", ".join(f"{path.name} ({size:,})" for path, size in largest)
            evidence = f"in {'scoring' if self.scored else 'loading alone'} it opened no socket and no training data; "
            evidence += f"{len(files)} files of {total:,} bytes were opened{': ' if names else ''}{names}"
            self.add(SELF_CONTAINED, "pass" if self.scored else "unknown", evidence)
        result: Result = "pass" if self.scored else "unknown"
        evidence = (
            f"{self.code:,} bytes of code and {total:,} of files it opened make {self.code + total:,}, the cap is "
        )
        self.add(SIZE, "fail" if self.code + total > CAP_BYTES else result, f"{evidence}{CAP_BYTES:,}")


def _fields(answer: object, **kinds: type) -> dict[str, Any]:
    if not isinstance(answer, dict) or not all(isinstance(answer.get(name), kind) for name, kind in kinds.items()):
        raise SandboxError(_FORGED)
    return answer


def _numbers(answer: object) -> list[float]:
    if not isinstance(answer, list) or not all(isinstance(number, int | float) for number in answer):
        raise SandboxError(_FORGED)
    try:
        return [float(number) for number in answer]
    except OverflowError as error:
        raise SandboxError(_FORGED) from error


class _RemoteScorer:
    """The scorer inside the sandbox; one at a time."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        box.ask("begin")

    def predict(self) -> Tensor:
        return torch.tensor(_numbers(self._box.ask("predict")), dtype=torch.float64)

    def reveal(self, token: int) -> None:
        self._box.ask("reveal", token)
