"""ONNX models in and out of .birdie files: `birdie.onnx.save`, `birdie.onnx.load`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.onnx.model_files import load as load
    from birdie.onnx.model_files import save as save
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
