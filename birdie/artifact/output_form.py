"""Form of an output of weights, from its name and from what a .birdie file holds.

    out/, an existing folder, out            a folder
    model.safetensors                        that format
    model.ptz                                what torch.save writes, under zlib
    model.onnx                               ONNX, if the file holds such a model
    model.pt, pytorch_model.bin, x.pth.tar   what torch.save writes: names by which birdie reads such files
    Qwen2.5-0.5B, model.v2                   a folder

Where a single checkpoint was compressed, other suffixes of letters are those of a file, which torch.save writes.
"""

import os
from pathlib import Path
from typing import Literal

from birdie.artifact.links import SUFFIX
from birdie.checkpoints.folder_scan import TORCH, is_of_others
from birdie.errors import ConfigError

Form = Literal["folder", "safetensors", "ptz", "torch", "onnx"]


def form_of(output: str, *, from_folder: bool, is_onnx: bool = False) -> Form:
    """Return what is written under a name.

    Args:
        output: the name, as the user has written it: with / at the end it is that of a folder.
        from_folder: whether the content is that of a folder, with files beside the weights, or else of one file.
        is_onnx: whether it is an ONNX model.

    Raises:
        ConfigError: such a name is that of a file of another kind, as .gguf and .json are.
    """
    path = Path(output)
    if output.endswith(("/", os.sep)) or path.is_dir() or not path.suffix:
        return "folder"
    if form := form_of_weights(path.name):
        return form
    if is_onnx and path.suffix.lower() == ".onnx":
        return "onnx"
    if is_of_others(path.name) or path.suffix == SUFFIX:
        raise ConfigError(
            f"cannot write {path.name}: weights are written as .safetensors, or as torch.save does (.pt, .ckpt, .bin, "
            f"…); for a folder of that name write {path.name}/"
        )
    return "folder" if from_folder or not path.suffix[1:].isalpha() else "torch"


def form_of_weights(name: str) -> Form | None:
    """Return the form of a file whose name is that of weights; None for other names."""
    name = name.lower()
    if name.endswith(".safetensors"):
        return "safetensors"
    return ("ptz" if name.endswith(".ptz") else "torch") if name.endswith(TORCH) else None
