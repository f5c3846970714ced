"""Calibrations of `birdie compress`: each kind is a class, and the first that suits a request is taken.

--calibrate TEXT      OnText           a language model in a Hugging Face folder
--calibrate IMAGES    OnImages         an image classifier in a Hugging Face folder
--calibrate RUN       OnRun            the GPT of a run or recipe
--model, --data       OnOwnModel       any module, which the user's own code builds, on batches, inputs or images
--calibrate NPZ       OnArrays         an ONNX model, by onnxruntime
a target alone        OnMadeUpInputs   a model of transformers or diffusers, whose inputs are made up
                      OnMadeUpArrays   an ONNX model, the same, if onnxruntime is installed
                      WithoutData      anything else
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from torch import Tensor, nn

from birdie import compress, hub, onnx  # doors: a kind loads what it needs
from birdie.errors import ConfigError, DataError
from birdie.system.own_code import called, imported, is_code

if TYPE_CHECKING:
    from birdie.compress import CalibrationResult, Where

Calibrated = tuple["CalibrationResult | None", str | None]


@dataclass(frozen=True, slots=True)
class OwnCode:
    """Code of the user's own, each as FILE.py:NAME or package.module:NAME (`birdie.system.own_code`).

    Attributes:
        model: builds the module.
        data: gives batches; or a file of inputs, or a folder of images; None: nothing is calibrated.
        loss: of a batch; None: outputs are compared.
        image_size: height and width to which images are resized; None: as the module and the images tell.
    """

    model: str
    data: str | None = None
    loss: str | None = None
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Request to calibrate a checkpoint.

    Attributes:
        checkpoint: path of a file or folder.
        source: a text, a folder of images, a run folder or a recipe; None: nothing of these.
        data, tokens: of the calibration of a run, or tokens of a text; None: the usual ones.
        code: of the user's own, that builds the module and loads the data.
        made_up: whether inputs may be made up.
    """

    checkpoint: Path
    source: Path | None = None
    data: Literal["train", "own"] | None = None
    tokens: int | None = None
    code: OwnCode | None = None
    made_up: bool = False


class Calibrator(ABC):
    """A kind of calibration; `request` is checked as it is made, before anything is read.

    Attributes:
        title, unit: of the progress; no title: there is no work.
        paths: files that are read, which an output must not replace.
        is_optional: whether nobody asked for it, so that its errors are notes.
    """

    title = ""
    unit: ClassVar[str] = ""
    paths: Sequence[Path] = ()
    is_optional: ClassVar[bool] = False

    def __init__(self, request: Request) -> None:
        self.request = request

    @staticmethod
    @abstractmethod
    def suits(request: Request) -> bool:
        """Return whether a request is for this kind."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the .birdie file."""
        return {}

    @abstractmethod
    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Calibrate the tensors of the checkpoint; return the result, if there is one, and a note for the user."""

    @staticmethod
    def note_of(error: Exception) -> str:
        """Return the note of a file without calibration."""
        return f"not calibrated: {hub.reason_of(error)}"


class _OnFolder(Calibrator):
    """Calibration of a Hugging Face folder on data."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if request.data is not None:
            raise ConfigError("--calibration-data is for the calibration of a run, not on a text or images; drop it")
        hub.require_transformers_folder(request.checkpoint)


class OnText(_OnFolder):
    """Calibration of a language model on a text."""

    unit = "tokens"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.source is not None
        self.text, self.paths = request.source, [request.source]
        self.title = f"calibrating on {self.text.name}"

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether the source is a file, and no recipe."""
        return request.source is not None and request.source.is_file() and request.source.suffix != ".toml"

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Return the result."""
        tokens = hub.TOKENS if self.request.tokens is None else self.request.tokens
        return hub.calibrate_on_text(self.request.checkpoint, state, self.text, tokens=tokens, **where), None


class OnImages(_OnFolder):
    """Calibration of an image classifier on images."""

    unit = "images"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.source is not None
        self.paths = compress.images_in(request.source)
        self.title = f"calibrating on {len(self.paths):,} images"

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether the source is a folder with images that is no run."""
        if request.source is None:
            return False
        from birdie.gpt.run.recipe_loading import recipe_file

        return not recipe_file(request.source).is_file() and bool(compress.images_in(request.source))

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Return the result."""
        return hub.calibrate_on_images(self.request.checkpoint, state, self.paths, **where), None


class OnArrays(Calibrator):
    """Calibration of an ONNX model on arrays of its inputs."""

    unit = "samples"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.source is not None
        if request.data is not None or request.tokens is not None:
            raise ConfigError("--calibration-data and --calibration-tokens are not for ONNX models; drop them")
        if request.source.suffix != ".npz":
            raise ConfigError(
                f"an ONNX model is calibrated on an .npz file with an array of samples for each of its inputs, and "
                f"{request.source} is none; write one with numpy.savez"
            )
        self.paths = [request.source]
        self.title = f"calibrating on {request.source.name}"

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether the checkpoint is an ONNX file, and there is a source."""
        return request.source is not None and request.checkpoint.suffix.lower() == ".onnx"

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:  # noqa: ARG002
        """Return the result."""
        if where.get("offload") is not None:
            raise ConfigError("--offload is for modules of torch, and an ONNX model is run by onnxruntime; drop it")
        return onnx.calibrate(self.request.checkpoint, self.request.source, progress=where.get("progress")), None


class OnRun(Calibrator):
    """Calibration of the GPT of a run or recipe, on its training data or its own samples."""

    unit = "tokens"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        from birdie.gpt.run.recipe_loading import load_run_recipe, recipe_file
        from birdie.gpt.run.run_data import data_files

        assert request.source is not None
        self.recipe = load_run_recipe(request.source)
        settings = self.recipe.calibration
        data = request.data or ("own" if settings.data == "own" else "train")
        tokens = settings.tokens if request.tokens is None else request.tokens
        self.settings = dataclasses.replace(settings, data=data, tokens=tokens)
        self.paths = [recipe_file(request.source), *data_files(self.recipe.data, shards=data == "train")]
        self.title = f"calibrating on {'samples of the model' if data == 'own' else self.recipe.data.path}"

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether the source exists."""
        return request.source is not None and request.source.exists()

    @property
    def metadata(self) -> dict[str, Any]:
        """Recipe and tokenizer, which make the file one that can be scored."""
        from birdie.gpt.data.tokenizer import load_tokenizer
        from birdie.gpt.run.gpt_calibration import artifact_metadata

        return artifact_metadata(self.recipe, load_tokenizer(self.recipe.data.tokenizer))

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Return the result."""
        from birdie.gpt.run.gpt_calibration import calibrate_gpt

        return calibrate_gpt(self.recipe, state, self.settings, **where).result, None


class OnOwnModel(Calibrator):
    """Calibration of a module that the user's own code builds, on batches that it loads or on inputs in a file."""

    title, unit = "calibrating on your data", "batches"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.code is not None
        code = request.code
        self.module = called("--model", code.model)
        if not isinstance(self.module, nn.Module):
            raise ConfigError(f"--model {code.model} gives a {type(self.module).__name__}; it has to return a module")
        self.loss = None if code.loss is None else imported("--loss", code.loss)
        self.batches: Any = None
        self.note: str | None = None
        path = Path(code.data or "")
        if code.data is not None and path.suffix in compress.SUFFIXES and not path.exists():
            raise DataError(f"--data {path} does not exist; give a file of inputs, or FILE.py:NAME")
        if code.image_size is not None and not path.is_dir():
            raise ConfigError(f"--image-size is of a folder of images, and --data {code.data} is none; drop it")
        if code.data is None:
            self.title = ""
        elif is_code(code.data):
            batches = imported("--data", code.data)
            self.batches = called("--data", code.data) if callable(batches) else batches
        elif images := compress.images_in(path):
            self.paths = images
            self.batches, self.note = compress.images_for(self.module, path, images, code.image_size)
        elif path.suffix in compress.SUFFIXES:
            self.paths = [path]
            self.batches, self.note = compress.inputs_in(path)
        else:
            raise ConfigError(
                f"--data {code.data} is neither FILE.py:NAME nor a file of inputs ({', '.join(compress.SUFFIXES)}) "
                "nor a folder of images; write a function that returns batches, def batches() in data.py, and give "
                "data.py:batches"
            )

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether there is such code."""
        return request.code is not None

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Return the result."""
        source = str(self.request.checkpoint)
        if self.batches is None:
            compress.fill(self.module, state, source)
            return None, None
        return compress.calibrate_own(self.module, self.batches, self.loss, state, source, **where), self.note


class OnMadeUpInputs(Calibrator):
    """Calibration of a model, or of the parts of a pipeline, on inputs that are made up."""

    title, unit = "calibrating on made-up inputs", "batches"
    is_optional = True

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether inputs may be made up, and the checkpoint is a folder that tells which."""
        may = request.source is None and request.made_up and request.checkpoint.is_dir()
        return may and hub.is_of_library(request.checkpoint)

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:
        """Return the result, and a note of what is not calibrated."""
        try:
            result, parts = hub.calibrate_without_data(
                self.request.checkpoint, state, device=where.get("device"), progress=where.get("progress")
            )
        except Exception as error:  # of the model's own code, too
            return None, self.note_of(error)
        note = "calibrated on made-up inputs; --calibrate with a text or images is better"
        return result, note + "".join(f"; not calibrated: {part} ({reason})" for part, reason in parts.items())


class OnMadeUpArrays(Calibrator):
    """Calibration of an ONNX model on inputs that are made up."""

    title, unit = "calibrating on made-up inputs", "samples"
    is_optional = True

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether inputs may be made up for an ONNX file, and can be run."""
        is_onnx = request.checkpoint.suffix.lower() == ".onnx" and request.checkpoint.is_file()
        return request.source is None and request.made_up and is_onnx and all(map(find_spec, ("onnx", "onnxruntime")))

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:  # noqa: ARG002
        """Return the result, and a note."""
        try:
            result = onnx.calibrate(self.request.checkpoint, progress=where.get("progress"))
        except Exception as error:  # of the runtime, too
            return None, self.note_of(error)
        return result, "calibrated on made-up inputs; --calibrate inputs.npz is better"


class WithoutData(Calibrator):
    """Absence of any calibration: the prior decides alone."""

    @staticmethod
    def suits(request: Request) -> bool:
        """Return whether there is nothing to calibrate on."""
        return request.source is None

    def __call__(self, state: Mapping[str, Tensor], **where: Unpack["Where"]) -> Calibrated:  # noqa: ARG002
        """Return neither a result nor a note."""
        return None, None


def calibrator(request: Request) -> Calibrator:
    """Return the kind of calibration that suits a request."""
    for kind in (OnOwnModel, OnArrays, OnText, OnImages, OnRun, OnMadeUpInputs, OnMadeUpArrays, WithoutData):
        if kind.suits(request):
            return kind(request)
    if is_code(str(request.source)):
        raise ConfigError(
            f"--calibrate {request.source} names code, which calibrates a model of your own: give it to --data, and "
            "to --model the function that returns the model"
        )
    raise ConfigError(
        f"--calibrate {request.source} is neither a run folder nor a recipe nor a text: it does not exist"
    )
