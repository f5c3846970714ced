"""Flags of `birdie compress`: the options of `birdie.save`, those of the command, and what they combine with."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from birdie.artifact import COMBINATIONS, SaveOptions, chosen
from birdie.cli.console import Json, Overwrite
from birdie.errors import ConfigError
from birdie.system.combinations import Excludes, Needs, Rule, require
from birdie.system.keywords import checked

if TYPE_CHECKING:
    from birdie.gpt.run.calibrating import OwnCode

MODEL = Parameter(
    help="Of a model of your own: FILE.py:NAME or package.module:NAME, a function without arguments (or a class) that "
    "returns the module. This code is imported and run."
)
DATA = Parameter(
    name="--data",
    help="What to calibrate that model on: FILE.py:NAME, batches or a function that returns them; inputs in a file "
    "(.npz, .npy, .safetensors, .pt), one a row; or a folder of images, whose values are then 0 to 1.",
)
LOSS = Parameter(
    help="FILE.py:NAME, a function (module, batch) → loss. Default: the batches are inputs, and outputs are compared."
)
IMAGE_SIZE = Parameter(
    help="Of a folder of images: resize them to 32, or 32x48 (height, width). Default: their own size, or the only one "
    "that the model accepts."
)
METRIC = Parameter(
    help="FILE.py:NAME, a function (module) → number, the higher the better, such as accuracy. It is run on the module "
    "of --model."
)
AT_LEAST = Parameter(help="Search for the smallest file whose metric is at least so much.")
FOLDER = Parameter(help="Keeps what the metric measured; the same command goes on there after a stop.")
_LOSSY = ("budget", "bits", "quality", "scheme", "calibration", "tune", "metric")
_CHAIN = Excludes(
    "full_every",
    (*_LOSSY, "base", "weights_only", "key", "include", "exclude", "keep", "dry_run"),
    "stores checkpoints of a run losslessly",
)
RULES: tuple[Rule, ...] = (
    Needs("model", ("own_data", "metric"), "builds the module to calibrate or measure"),
    Needs("own_data", ("model",), "is for a model of your own"),
    Needs("loss", ("own_data",), "is of the batches"),
    Needs("image_size", ("own_data",), "is of a folder of images"),
    Needs("metric", ("at_least",), "is searched for the smallest file that holds a value"),
    Needs("at_least", ("metric",), "is a value of a metric of your own"),
    Needs("metric", ("model",), "measures a module"),
    Needs("folder", ("metric",), "keeps what a metric measured"),
    Excludes("lossless", ("model",), "keeps every bit"),
    Excludes("metric", ("budget", "bits", "quality", "tune", "base", "dry_run"), "finds the size"),
    Excludes("model", ("calibrate", "calibration_data", "calibration_tokens"), "has its own data"),
    *COMBINATIONS,
    _CHAIN,
    Needs("offload", ("data",), "is about a calibration"),
    Needs("calibration_data", ("data",), "is about a calibration"),
    Needs("calibration_tokens", ("data",), "is about a calibration"),
    Excludes("tune", ("offload",), "keeps the complete model in memory"),
    Excludes("dry_run", ("quality", "tune", "base"), "has no forecast of that"),
)
"""Combinations of flags that are refused."""
INPUTS = (
    "--model net.py:make --data data.py:batches (in Python: calibration=birdie.calibrate(model, example_inputs=inputs))"
    ", or for a folder or a run of birdie --calibrate TEXT_OR_RUN"
)
"""Flags that give a calibration its inputs, for messages."""
_FLAGS = {
    "calibration": "--calibrate",
    "data": INPUTS,
    "inputs": INPUTS,
    "own_data": "--data",
}


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def own_code(model: str, data: str | None, loss: str | None, image_size: str | None) -> "OwnCode":
    """Return the code of the user's own that flags name."""
    from birdie.gpt.run.calibrating import OwnCode

    return OwnCode(model, data, loss, None if image_size is None else _size_of_images(image_size))


def _size_of_images(text: str) -> tuple[int, int]:
    sizes = re.fullmatch("([1-9][0-9]{0,4})(?:[x×]([1-9][0-9]{0,4}))?", text.strip())
    if sizes is None:
        raise ConfigError(f"--image-size {text} is no size of images; write 32, or 32x48 for height and width")
    return int(sizes[1]), int(sizes[2] or sizes[1])


@dataclass(frozen=True, kw_only=True)
class CompressFlags(SaveOptions):
    """All flags of `birdie compress`."""

    output: Annotated[
        str | None,  # a Path has lost the slash at the end
        Parameter(
            name=["-o", "--output"],
            help="The .birdie file to write; of a run, the folder of its chain.",
        ),
    ] = None
    overwrite: Overwrite = False
    full_every: Annotated[
        int | None,
        Parameter(
            help="Of a folder of checkpoints of a run: store them as a chain of lossless deltas, of which one in "
            "so many stands alone. Default: 10, for a folder of nothing but checkpoints."
        ),
    ] = None
    weights_only: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Take the state dict alone, also with --lossless; skip objects of other programs.",
        ),
    ] = False
    key: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="The dict of tensors that is meant, for example model.ema, or the names in it that begin so, as in "
            "state_dict.model.; repeatable: several become one file, with their keys as prefixes. Default: the usual "
            "layouts are understood.",
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            help="Pattern of names of tensors to take, and no others: 'encoder.*'. Names are those in the .birdie "
            "file. Repeatable, as --exclude.",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Pattern of names of tensors to leave out: '*.num_batches_tracked'."),
    ] = None
    keep: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Of a folder: pattern of names of files to keep as they are, of any size."),
    ] = None
    skip: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Of a folder: pattern of names of files (checkpoints) to leave out."),
    ] = None
    calibrate: Annotated[
        Path | None,
        Parameter(
            help="For a Hugging Face folder: a text (language models) or a folder of images (classifiers). For models "
            "of birdie: the run folder or recipe. For an ONNX file: an .npz file with an array of samples for each "
            "input. Precision then follows the sensitivity of the loss. none: no inputs are made up for a folder, "
            "either."
        ),
    ] = None
    model: Annotated[str | None, MODEL] = None
    own_data: Annotated[str | None, DATA] = None
    loss: Annotated[str | None, LOSS] = None
    image_size: Annotated[str | None, IMAGE_SIZE] = None
    metric: Annotated[str | None, METRIC] = None
    at_least: Annotated[float | None, AT_LEAST] = None
    folder: Annotated[Path | None, FOLDER] = None
    calibration_data: Annotated[
        Literal["train", "own"] | None,
        Parameter(help="train: training shards; own: samples of the model. Default: the recipe's, else train."),
    ] = None
    calibration_tokens: Annotated[
        int | None, Parameter(help="Number of calibration tokens. Default: the recipe's, else 65,536.")
    ] = None
    offload: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Calibrate with temporary files beside the output in place of memory; needs --calibrate.",
        ),
    ] = False
    device: Annotated[
        Literal["auto", "cuda", "mps", "cpu"],
        Parameter(help="Of the calibration; auto takes a GPU if there is one."),
    ] = "cpu"
    dry_run: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Write nothing: show expected bytes, error and time of these settings, and of others, within seconds.",
        ),
    ] = False
    json: Json = False

    def __post_init__(self) -> None:
        checked(self)
        require(RULES, self.chosen, flag_of)
        if self.output is None and not self.dry_run:
            raise ConfigError("there is no file to write; add -o FILE.birdie, or --dry-run to see sizes alone")

    @property
    def data(self) -> Path | None:
        """Path of what to calibrate on."""
        return None if self.calibrate == Path("none") else self.calibrate

    @property
    def code(self) -> "OwnCode | None":
        """Code of the user's own."""
        return None if self.model is None else own_code(self.model, self.own_data, self.loss, self.image_size)

    @property
    def has_data(self) -> bool:
        """True if there is something to calibrate on."""
        return self.data is not None or self.own_data is not None

    @property
    def makes_up_inputs(self) -> bool:
        """True if inputs are made up for the calibration of a model whose configuration tells which."""
        return self.calibrate is None and self.model is None and (self.budget is not None or self.bits is not None)

    @property
    def chosen(self) -> set[str]:
        """Names of the options that do not have their defaults; "calibration" also with inputs that are made up."""
        names = chosen(self)
        if self.has_data:
            return names | {"calibration", "data", "inputs"}
        return names | ({"calibration", "inputs"} if self.makes_up_inputs else set())

    @property
    def is_lossy(self) -> bool:
        """True if a flag says how weights are rounded."""
        return not self.chosen.isdisjoint(_LOSSY)

    @property
    def is_chain(self) -> bool:
        """True if the checkpoint is meant to be the folder of a run."""
        return self.full_every is not None

    def require_chain(self, folder: Path) -> None:
        """Check the flags for a folder of checkpoints of a run."""
        if not folder.is_dir():
            raise ConfigError(f"--full-every is for a folder of checkpoints, and {folder} is none; drop it")
        other = next((name for name in _CHAIN.others if name in self.chosen), None)
        if other is not None:
            raise ConfigError(
                f"{folder} holds checkpoints of a run, which are kept losslessly as a chain, without {flag_of(other)}; "
                "drop that, or give one checkpoint"
            )

    def require_ranks(self, count: int) -> None:
        """Check the flags for a number of ranks."""
        if count > 1 and self.has_data and not self.offload:
            raise ConfigError("ranks share a calibration by files; add --offload, or start one process")
        if count > 1 and self.metric is not None:
            raise ConfigError("--metric is measured by one process; start one")

    def save_options(self, **changes: Any) -> SaveOptions:
        """Return the options of `birdie.save`, some of them with other values."""
        values = {option.name: getattr(self, option.name) for option in fields(SaveOptions)}
        return SaveOptions(**(values | changes))
