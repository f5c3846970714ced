"""ONNX models in and out of .birdie files: `birdie.onnx.save`, `birdie.onnx.load`, `birdie.onnx.calibrate`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.onnx.model_files import load as load
    from birdie.onnx.model_files import save as save
    from birdie.onnx.onnx_calibration import calibrate as calibrate
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
