"""The process inside the sandbox: it loads a script and answers requests, line by line.

    birdie.golf.audit.sandbox ──JSON lines──► this process ──► the script
                              ◄──JSON lines──

It is started as a file (`python -I sandbox_child.py IN OUT LIMITS SCRIPT`), isolated already, and imports nothing but
the standard library. The script shares its memory and may change anything in here. So nothing in here is believed:
tokens come in and numbers go out, and what they mean is judged outside.
"""

import array
import base64
import contextlib
import importlib.util
import inspect
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = {
    "num_layers": 4,
    "n_layer": 4,
    "model_dim": 64,
    "n_embd": 64,
    "dim": 64,
    "num_heads": 4,
    "n_head": 4,
    "num_kv_heads": 2,
    "embedding_dim": 64,
    "bigram_vocab_size": 64,
    "train_seq_len": 64,
    "eval_seq_len": 64,
}
"""Sizes of the model in the smoke test."""


def limit(limits: dict[str, int]) -> None:
    """Limit this process, and each that it starts."""
    for kind, wanted in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (bound, bound))


class Host:
    """The script, and the operations that the parent process can ask for."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.module: Any = None
        self.current: Any = None
        self.built: Any = None

    def load(self) -> dict[str, Any]:
        """Run the script's top level, under another name than __main__."""
        sys.path.insert(0, str(Path(self.script).parent))
        sys.path.append(str(Path(__file__).parents[3]))  # of birdie
        sys.argv = [self.script]
        spec = importlib.util.spec_from_file_location("foreign_script", self.script)
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules["foreign_script"] = self.module
        spec.loader.exec_module(self.module)
        vocabulary: Any = getattr(self.module, "VOCABULARY", None)
        if vocabulary is None:
            vocabulary = getattr(getattr(self.module, "Hyperparameters", None), "vocab_size", None)
        try:
            vocabulary = int(vocabulary)
        except (TypeError, ValueError, OverflowError):  # a dataclass field without a value, say
            vocabulary = None
        return {
            "score": callable(getattr(self.module, "score", None)),
            "scorer": callable(getattr(self.module, "scorer", None)),
            "model": isinstance(getattr(self.module, "GPT", None), type),
            "vocabulary": vocabulary,
        }

    def score(self, tokens: list[int]) -> str:
        """Return the nats of the targets of `tokens`."""
        try:
            import numpy
        except ImportError:
            return _packed("d", self.module.score(tokens))
        return _packed("d", self.module.score(numpy.asarray(tokens, dtype=numpy.int64)))

    def begin(self) -> None:
        """Create a new scorer."""
        self.current = self.module.scorer()

    def predict(self) -> str:
        """Return the scorer's log-probabilities of the next token."""
        return _packed("d", self.current.predict())

    def reveal(self, token: int) -> None:
        """Give the scorer the next token."""
        self.current.reveal(token)

    def model(self, length: int) -> dict[str, Any]:
        """Build GPT, small if it can be, so that it predicts `length` tokens."""
        import torch

        vocabulary = int(getattr(self._settings({}), "vocab_size", 1024))
        problem = ""
        for sizes in (SMALL, {name: size for name, size in SMALL.items() if "layer" not in name}, {}):
            try:
                torch.manual_seed(0)
                self.built = self._build(sizes).float().eval()
                self.logits([0] * length)
            except Exception as error:
                problem = problem or f"{type(error).__name__}: {str(error)[:300]}"
                continue
            parameters = sum(parameter.numel() for parameter in self.built.parameters())
            return {"vocabulary": vocabulary, "parameters": parameters, "shrunk": bool(sizes)}
        raise RuntimeError(problem)

    def logits(self, tokens: list[int]) -> dict[str, Any]:
        """Return the model's logits for `tokens`, and their shape."""
        import torch

        with torch.no_grad():
            logits = self._logits(self.built, torch.tensor([tokens]))
        return {"shape": list(logits.shape), "values": _packed("f", logits.reshape(-1))}

    def _settings(self, sizes: dict[str, int]) -> Any:
        kind = getattr(self.module, "Hyperparameters", None)
        settings = kind() if kind is not None else type("Settings", (), {})()
        for name, size in sizes.items():
            if hasattr(settings, name):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(settings, name, size)
        return settings

    def _build(self, sizes: dict[str, int]) -> Any:
        settings = self._settings(sizes)
        arguments = {}
        for name, parameter in inspect.signature(self.module.GPT).parameters.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name in sizes:
                arguments[name] = sizes[name]
            elif hasattr(settings, name):
                arguments[name] = getattr(settings, name)
            elif parameter.default is parameter.empty and not variadic:
                arguments[name] = settings
        return self.module.GPT(**arguments)

    def _logits(self, model: Any, ids: Any) -> Any:
        """Return logits (1, T, vocabulary): of `forward_logits`, of the input of the loss, or of the model itself."""
        import torch.nn.functional as functional

        real = functional.cross_entropy
        inputs: list[Any] = []

        def recording(logits: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.append(logits)
            return real(logits, *args, **kwargs)

        def input_of_loss() -> Any:
            functional.cross_entropy = recording  # type: ignore[assignment]
            try:
                model(ids, ids)
            finally:
                functional.cross_entropy = real
            return inputs[-1]

        attempts: list[Callable[[], Any]] = [input_of_loss, lambda: model(ids)]
        if hasattr(model, "forward_logits"):
            attempts.insert(0, lambda: model.forward_logits(ids))
        problem: Exception = RuntimeError("GPT gives no logits")
        for attempt in attempts:
            try:
                return attempt().float().reshape(1, ids.shape[1], -1)
            except Exception as error:
                problem = error
        raise problem


def _packed(kind: str, values: Any) -> str:
    """Return numbers as text: base64 of little-endian float32 ("f") or float64 ("d")."""
    for method in ("detach", "cpu"):
        values = getattr(values, method)() if hasattr(values, method) else values
    values = values.tolist() if hasattr(values, "tolist") else values
    return base64.b64encode(array.array(kind, [float(value) for value in values]).tobytes()).decode()


def main() -> None:
    """Answer requests until the pipe closes."""
    source, sink, limits, script = sys.argv[1:5]
    answers = os.fdopen(int(sink), "w", encoding="utf-8")
    requests = os.fdopen(int(source), encoding="utf-8")
    limit(json.loads(limits))

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    nothing = os.open(os.devnull, os.O_RDWR)  # in place of what came from outside
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    host = Host(script)
    answer(ready=True)
    for line in requests:
        request = json.loads(line)
        number = request["id"]
        try:
            answer(id=number, value=getattr(host, request["op"])(*request["args"]))
        except MemoryError:
            answer(id=number, error="it ran out of memory", kind="MemoryError")
        except BaseException as error:
            answer(id=number, error=f"{type(error).__name__}: {str(error)[:400]}", kind=type(error).__name__)


if __name__ == "__main__":
    main()
