"""Every architecture of other libraries through the commands, made small: `python -m benchmarks.architectures`.

    python -m benchmarks.architectures                     one class of each model type of transformers, and the rest
    python -m benchmarks.architectures --every             each class of each task
    python -m benchmarks.architectures --only 'mixtral*'   model types, classes or libraries by their names
    python -m benchmarks.architectures --count 40          so many of them, spread evenly
    python -m benchmarks.architectures --page PATH         docs/ecosystem.md

Classes are those of the auto mappings of transformers, the models of diffusers and two pipelines, and adapters of peft;
random weights, and sizes found by rule (`benchmarks.shrunken`). In a process of its own, with
limits of time and memory, each model is saved, compressed (`birdie compress FOLDER --bits 6 --effort fast`),
decompressed and loaded by `from_pretrained`. It comes back if all tensors are the decoded ones to the bit, if it has
the outputs of the first model with the decoded weights (where inputs can be made up), and if every file of the folder
is in the result or named as left out.
"""

import argparse
import fnmatch
import importlib
import inspect
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import birdie
from benchmarks.command import command_parser, log, report
from benchmarks.shrunken import Size, distinct, variants
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import BirdieError
from birdie.hub.made_up import made_up_inputs
from birdie.hub.names_on_disk import NamesOnDisk
from birdie.system.files import atomic_path

SECONDS, MEMORY = 120, 8 << 30  # limits of one class, in processor time and of its data
_PATIENCE = 5  # times as long as that by the clock
LEAST_WEIGHTS, MOST_WEIGHTS = 50_000, 20_000_000  # below the first, headers are larger than weights of 6 bits
TRIES = 6  # variants that are made until one runs
_ORDER = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "PRETRAINING", "IMAGE_CLASSIFICATION")
_MADE = "cannot be made small: "


@dataclass(frozen=True)
class Subject:
    """A class of a library: `kind` is its model type in transformers, and its own name elsewhere."""

    library: str
    kind: str
    name: str


@dataclass(frozen=True)
class Outcome:
    """Result for one class.

    Attributes:
        library, kind, name: of the subject.
        buildable: whether there is a small model of the class; if not, `reason` says why.
        back: whether all of it came back; if not, `reason` says what did not.
        calibrated: whether data reached it; if not, `reason` says why.
        outputs: whether outputs were compared, and not the tensors alone.
        weights: of the model.
        seconds: of processor time, of the command that compresses.
        reason: of what is missing, one line.
    """

    library: str
    kind: str
    name: str
    buildable: bool = False
    back: bool = False
    calibrated: bool = False
    outputs: bool = False
    weights: int = 0
    seconds: float = 0.0
    reason: str = ""


class NotMadeError(Exception):
    """A class of which there is no small model: it is not counted."""


def subjects(*, every: bool = False) -> list[Subject]:
    """Return the classes of all installed libraries; of each model type of transformers one, or every one."""
    return [*_transformers(every=every), *_diffusers(), *_peft()]


def _transformers(*, every: bool) -> list[Subject]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = {name: getattr(auto, name) for name in dir(auto) if name.startswith("MODEL_") and name.endswith("_NAMES")}

    def rank(name: str) -> tuple[int, str]:
        task = name.removeprefix("MODEL_").removeprefix("FOR_").removesuffix("_MAPPING_NAMES")
        is_base = name == "MODEL_MAPPING_NAMES"
        return (len(_ORDER) + is_base if task not in _ORDER else _ORDER.index(task)), name

    pairs: dict[tuple[str, str], None] = {}
    for table in sorted(tables, key=rank):
        for kind, names in tables[table].items():
            pairs |= dict.fromkeys((kind, name) for name in ([names] if isinstance(names, str) else names))
    chosen = list(pairs) if every else list({kind: (kind, name) for kind, name in reversed(pairs)}.values())
    return [Subject("transformers", kind, name) for kind, name in sorted(chosen)]


def _diffusers() -> list[Subject]:
    if find_spec("diffusers") is None:
        return []
    diffusers = importlib.import_module("diffusers")
    names = []
    for name in sorted(dir(diffusers)):
        with suppress(Exception):  # a class that needs another library
            one = getattr(diffusers, name)
            if isinstance(one, type) and issubclass(one, diffusers.ModelMixin) and one is not diffusers.ModelMixin:
                names.append(name)
    return [Subject("diffusers", name, name) for name in [*names, "DDPMPipeline", "DDIMPipeline"]]


def _peft() -> list[Subject]:
    if find_spec("peft") is None:
        return []
    return [
        Subject("peft", name, name) for name in ("LoraConfig", "LoHaConfig", "LoKrConfig", "IA3Config", "OFTConfig")
    ]


Build = Callable[[Path], nn.Module]
"""Save a small model, or a part of one, into a folder, and return what `from_pretrained` must give back."""


def builds(subject: Subject) -> Iterable[Build]:
    """Return ways to make a small model of a class, the smallest first.

    Raises:
        NotMadeError: there is none.
    """
    return {"transformers": _of_transformers, "diffusers": _of_diffusers, "peft": _of_peft}[subject.library](subject)


def _of_transformers(subject: Subject) -> Iterable[Build]:
    transformers = importlib.import_module("transformers")
    kind: Any = getattr(transformers, subject.name, None)
    if kind is None:
        raise NotMadeError(f"{_MADE}transformers has no class {subject.name}")
    config = _default_config(kind, transformers, subject.kind)

    return _small((size, partial(kind, small)) for size, small in variants(config))


Maker = tuple[Size, Callable[[], nn.Module]]
Save = Callable[[Any, Path], None]


def _small(makers: Iterator[Maker], save: Save | None = None) -> Iterator[Build]:
    """Yield builds of those models that are made and are small, the tiny ones last."""
    reason, is_made, tiny, large = "", False, list[Build](), list[Size]()
    for size, make in makers:
        if sum(other[1:] == size[1:] and other.divisor > size.divisor for other in large) > 1:  # and is wider than they
            continue
        try:
            with torch.device("meta"):
                count = sum(weight.numel() for weight in make().parameters())
        except Exception as error:  # whatever the model objects to
            reason = reason or _line(error)
            continue
        if count > MOST_WEIGHTS:
            reason = reason or f"{count:,} weights"
            large.append(size)
            continue

        def build(folder: Path, make: Callable[[], Any] = make) -> nn.Module:
            torch.manual_seed(0)
            model = make().eval()
            save(model, folder) if save else model.save_pretrained(folder)
            return model  # type: ignore[no-any-return]

        is_made = True
        if count < LEAST_WEIGHTS:
            tiny.append(build)
        else:
            yield build
    yield from reversed(tiny)
    if not is_made:
        raise NotMadeError(_MADE + (reason or "no smaller configuration is accepted"))


def _default_config(kind: Any, transformers: Any, model_type: str) -> Any:
    try:
        of_type = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
        of_class = kind.config_class
        return (of_type if of_class is None or issubclass(of_type, of_class) else of_class)()
    except Exception as error:
        raise NotMadeError(_MADE + _line(error)) from error


def _of_diffusers(subject: Subject) -> Iterable[Build]:
    diffusers = importlib.import_module("diffusers")
    is_pipeline = subject.name.endswith("Pipeline")
    kind: Any = diffusers.UNet2DModel if is_pipeline else getattr(diffusers, subject.name)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }

    def save(model: Any, folder: Path) -> None:
        scheduler = getattr(diffusers, subject.name.replace("Pipeline", "Scheduler"))()
        getattr(diffusers, subject.name)(unet=model, scheduler=scheduler).save_pretrained(folder)

    def makers() -> Iterator[Maker]:
        for size, settings in distinct(defaults):
            settings |= {name: 4 for name, value in settings.items() if "norm_num_groups" in name and value}
            yield size, partial(kind, **settings)

    return _small(makers(), save if is_pipeline else None)


def _base() -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)).eval()


def _of_peft(subject: Subject) -> Iterable[Build]:
    peft = importlib.import_module("peft")
    targets: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    if subject.name == "IA3Config":
        targets["feedforward_modules"] = ["down_proj"]

    def build(folder: Path) -> nn.Module:
        model: Any = peft.get_peft_model(_base(), getattr(peft, subject.name)(task_type="CAUSAL_LM", **targets)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.02 * torch.randn_like(weight))
        model.save_pretrained(folder)
        return model  # type: ignore[no-any-return]

    return [build]


def examine(subject: Subject, folder: Path) -> Outcome:
    """Return what becomes of a class: made, compressed, decompressed, loaded, compared. All files are in `folder`."""
    outcome = Outcome(**asdict(subject))
    first: tuple[nn.Module, Path] | None = None
    last, tries = "", 0
    try:
        for number, build in enumerate(builds(subject)):
            root = folder / str(number)
            root.mkdir()
            try:
                model = build(root / "model")
            except Exception as error:  # a configuration that the class does not take after all
                last = _MADE + _line(error)
                continue
            first, tries = first or (model, root), tries + 1
            if _runs(subject, model):
                first = model, root
                break
            if tries == TRIES or time.process_time() > SECONDS / 4:
                break
    except NotMadeError as error:
        last = str(error)
    if first is None:
        return replace(outcome, reason=last)
    return _through(replace(outcome, buildable=True), *first)


def _runs(subject: Subject, model: nn.Module) -> bool:
    """Return whether a small model accepts made-up inputs, which tells that its sizes belong together."""
    if subject.library not in ("transformers", "diffusers"):
        return True
    try:
        made_up_inputs(model, torch.Generator().manual_seed(0))
    except Exception:  # of the model's code
        return False
    return True


def _through(outcome: Outcome, model: nn.Module, root: Path) -> Outcome:
    """Return the outcome of a model that is saved in root/model."""
    folder, file, back = root / "model", root / "model.birdie", root / "back"
    weights = sum(weight.numel() for weight in model.parameters())
    start = time.process_time()
    for bits in (["--bits", "6"], []):  # of small adapters headers and vectors alone take more
        code, text, errors = _command("compress", folder, "-o", file, *bits, "--effort", "fast", "--json")
        if "cannot be met" not in errors:
            break
    outcome = replace(outcome, weights=weights, seconds=round(time.process_time() - start, 1))
    if code:
        return replace(outcome, reason=f"compress fails: {errors}")
    summary = json.loads(text)
    note = summary.get("calibration") or "not calibrated: nothing is made up for this library"
    outcome = replace(outcome, calibrated=not note.startswith("not calibrated"))
    code, _, errors = _command("decompress", file, "-o", back)
    if code:
        return replace(outcome, reason=f"decompress fails: {errors}")
    lost = _files(folder) - _files(back) - set(summary["compressed"]) - set(summary["left_out"])
    if lost:
        return replace(outcome, reason=f"file {sorted(lost)[0]} is neither kept nor named")
    try:
        outputs, difference = _compare(outcome, model, folder, file, back)
    except NotMadeError as error:
        return replace(outcome, buildable=False, reason=str(error))
    except Exception as error:  # of from_pretrained, or of a tensor that is another
        return replace(outcome, reason=f"does not come back: {_line(error)}")
    if difference:
        return replace(outcome, reason=f"does not come back: {difference}")
    return replace(outcome, back=True, outputs=outputs, reason="" if outcome.calibrated else note)


def _command(*arguments: Any) -> tuple[int, str, str]:
    """Return exit code, stdout and the last line of stderr of a command of birdie, or of a traceback."""
    text, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(errors):
            code = run(build_app, [str(argument) for argument in arguments])
    except Exception as error:  # what birdie lets through
        return 1, "", f"traceback, {_line(error)}"
    if code:
        with suppress(ValueError, KeyError, TypeError):
            return code, "", str(json.loads(text.getvalue())["error"]["message"])[:300]
    lines = [line for line in errors.getvalue().splitlines() if line.strip()] or [""]
    return code, text.getvalue(), lines[-1][:300]


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _compare(outcome: Outcome, model: Any, folder: Path, file: Path, back: Path) -> tuple[bool, str]:
    """Return whether outputs were compared, and what differs between what comes back and the decoded weights."""
    decoded = dict(birdie.load(file))
    if outcome.library == "transformers":
        try:
            original, expected = type(model).from_pretrained(folder, output_loading_info=True)
        except Exception as error:  # it needs files that save_pretrained does not write
            raise NotMadeError(f"{_MADE}its folder cannot be loaded: {_line(error)}") from error
        loaded, info = type(model).from_pretrained(back, output_loading_info=True)
        new = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        old = {name: sorted(map(str, expected[name])) for name in new}
        if new != old:
            return False, f"{new} in root of {old}"
        try:
            reference: Any = NamesOnDisk(original, open_checkpoint(folder).content, folder)
            reference.load_state_dict({name: decoded[name] for name in reference.state_dict()})
            NamesOnDisk(loaded, decoded, back)  # compares each tensor
        except BirdieError:  # conversions without a way back: compare what is saved again
            loaded.save_pretrained(back.with_name("again"))
            saved = open_checkpoint(back.with_name("again")).content
            return False, _first_difference(decoded, saved)
        return _same_outputs(reference, loaded)
    if outcome.library == "peft":
        loaded = birdie.from_pretrained(file, base=_base())
        return False, _first_difference(decoded, importlib.import_module("peft").get_peft_model_state_dict(loaded))
    loaded = birdie.from_pretrained(file)
    part = getattr(loaded, "unet", loaded) if outcome.name.endswith("Pipeline") else loaded
    prefix = "unet/" if outcome.name.endswith("Pipeline") else ""
    state = {name.removeprefix(prefix): weight for name, weight in decoded.items()}
    return False, _first_difference(state, part.state_dict())


def _first_difference(decoded: dict[str, Tensor], loaded: dict[str, Tensor]) -> str:
    """Return the first tensor of a file that a model does not have to the bit, or nothing."""
    for name, tensor in decoded.items():
        other = loaded.get(name)
        if other is None or other.shape != tensor.shape or not torch.equal(other.to(tensor.dtype), tensor):
            return f"tensor {name} is {'missing' if other is None else 'another'}"
    return ""


def _same_outputs(reference: Any, loaded: Any) -> tuple[bool, str]:
    """Return whether outputs could be compared, and the difference between those of two models."""
    try:
        inputs = made_up_inputs(loaded, torch.Generator().manual_seed(0))[0]
        with torch.no_grad():
            torch.manual_seed(0)
            expected = reference(**inputs.keywords)
    except Exception:  # no inputs are known that the model takes
        return False, ""
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = loaded(**inputs.keywords)
    pairs = zip(_tensors(expected), _tensors(outputs), strict=True)
    if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs):
        return True, ""
    return True, "other outputs than those of the decoded weights"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _child(subject: Subject, folder: str, result: str, seconds: int) -> None:
    """Examine a class and write its outcome; what it prints is dropped."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # those of the libraries, which a test would take for errors
    for library in ("transformers", "diffusers"):
        with suppress(Exception):
            importlib.import_module(f"{library}.utils.logging").set_verbosity_error()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            outcome = examine(subject, Path(folder))
        except BaseException as error:
            outcome = Outcome(**asdict(subject), buildable=True, reason=_line(error))
    with atomic_path(Path(result)) as temporary:
        temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")


def examine_apart(subject: Subject, seconds: int = SECONDS) -> Outcome:
    """Return the outcome of a class, examined in a process of its own within limits of time and memory."""
    with tempfile.TemporaryDirectory(prefix="birdie-architectures-") as folder:
        result = Path(folder) / "outcome.json"
        process = multiprocessing.get_context("fork").Process(
            target=_child, args=(subject, folder, str(result), seconds)
        )
        process.start()
        process.join(_PATIENCE * seconds)
        if process.is_alive():
            process.kill()
            process.join()
        outcome = Outcome(**asdict(subject), buildable=True)
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return replace(outcome, seconds=seconds, reason=f"takes over {seconds} s")
        if not result.exists():
            return replace(outcome, reason=f"the process ends with {process.exitcode}")
        return Outcome(**json.loads(result.read_text(encoding="utf-8")))


_INTRODUCTION = """# Ecosystem

Which models of other libraries go through birdie? `python -m benchmarks.architectures --page docs/ecosystem.md`
writes this page. It takes one class of each model type in the auto mappings of `transformers` (`--every`: each class
of each task), the models of `diffusers` and two pipelines, and adapters of `peft`. Configurations are made small by
rule (two layers, 256 words, images of 32 × 32), and weights are random. Each model goes through `birdie compress
FOLDER --bits 6 --effort fast` with made-up inputs, `birdie decompress` and `from_pretrained`, in a process of its own
with a limit of 120 s of processor time.

A model *comes back* if every tensor that `from_pretrained` loads is the decoded one to the bit, if its outputs are
those of the first model with the decoded weights (where inputs can be made up), and if every file of the folder is in
the result or named as left out. It is *calibrated* if the command says so. A model that is not calibrated comes back
all the same; give `example_inputs`, or a text, to calibrate it ([Hugging Face](huggingface.md)).
"""

_REASONS = {
    r"takes over": "it takes more processor time than the limit",
    r"nothing is known of": "its forward function has arguments of which nothing is known",
    r"cannot be made up|does not accept inputs": "it does not accept the inputs that were made up",
    r"nothing is made up": "nothing is made up for its kind of model, such as an adapter",
    r"returns no floating": "its output has no floating tensor to compare",
    r"needs .* of memory": "it needs more memory than is free",
    r"not finite": "a sensitivity is not finite",
    r"requires the timm": "it needs timm, which was not installed",
    r"missing \d+ required": "its constructor has arguments without a default",
    r"^[\d,]+ weights": "it has too many weights",
}


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the text of docs/ecosystem.md."""
    tried = [one for one in outcomes if one.buildable]
    lines = [_INTRODUCTION]
    lines += [
        "| library | classes | come back | outputs compared | calibrated | slowest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for library in [*dict.fromkeys(one.library for one in tried), "all"]:
        rows = [one for one in tried if library in (one.library, "all")]
        back, data, outputs = (sum(getattr(one, key) for one in rows) for key in ("back", "calibrated", "outputs"))
        shares = f"{back / len(rows):.1%} | {outputs} | {data / len(rows):.1%}"
        lines.append(f"| {library} | {len(rows)} | {shares} | {max(one.seconds for one in rows):.0f} s |")
    groups = (
        ("not back", [one for one in tried if not one.back]),
        ("back, not calibrated", [one for one in tried if one.back and not one.calibrated]),
        ("not tried: no small model can be made", [one for one in outcomes if not one.buildable]),
    )
    lines += ["", "| outcome | reason | classes | for example |", "|---|---|--:|---|"]
    for title, some in groups:
        reasons: dict[str, list[str]] = {}
        for one in some:
            reasons.setdefault(_summary(one.reason), []).append(one.name)
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"| {title} | {reason} | {len(names)} | {', '.join(list(dict.fromkeys(names))[:2])} |")
    lines += ["", "The reason of each class is in the log of the command, and in its `--json`."]
    return "\n".join(lines) + "\n"


def _summary(reason: str) -> str:
    """Return what a reason has in common with those of other classes."""
    return next((text for pattern, text in _REASONS.items() if re.search(pattern, reason)), "other errors")


def chosen(every: Sequence[Subject], pattern: str | None, count: int | None) -> list[Subject]:
    """Return the subjects that a pattern names, or `count` of them, spread evenly."""
    some = [
        one
        for one in every
        if pattern is None or any(fnmatch.fnmatchcase(text, pattern) for text in asdict(one).values())
    ]
    if count is None or count >= len(some):
        return some
    return [some[round(index * (len(some) - 1) / max(1, count - 1))] for index in range(count)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Examine, print the table; exit code 1 if less than 97 % come back."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="of libraries, model types or classes, with * and ?")
    parser.add_argument("--count", type=int, help="so many of them, spread evenly (default: all)")
    parser.add_argument("--every", action="store_true", help="every class of each model type (default: one)")
    parser.add_argument("--page", type=Path, help="write docs/ecosystem.md here")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"limit of one class (default: {SECONDS})")
    options: argparse.Namespace = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before its libraries are imported: nothing is downloaded
    outcomes = []
    some = chosen(subjects(every=options.every), options.only, options.count)
    if not some:
        raise SystemExit("no class has such a name; give another pattern to --only")
    for number, subject in enumerate(some, start=1):
        outcome = examine_apart(subject, options.seconds)
        outcomes.append(outcome)
        state = "back" if outcome.back else "not back" if outcome.buildable else "not made"
        data = "calibrated" if outcome.calibrated else "not calibrated"
        log(f"{number} of {len(some)}: {outcome.name}: {state}, {data}, {outcome.seconds:.0f} s {outcome.reason}")
    if options.page is not None:
        with atomic_path(options.page) as temporary:
            temporary.write_text(page(outcomes), encoding="utf-8")
    report([asdict(one) for one in outcomes], as_json=options.json)
    tried = [one for one in outcomes if one.buildable]
    log(page(outcomes).removeprefix(_INTRODUCTION) if tried else "nothing could be tried")
    sys.exit(0 if sum(one.back for one in tried) >= 0.97 * len(tried) else 1)


if __name__ == "__main__":
    main()
