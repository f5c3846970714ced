"""Quantization of weights to integers and back: schemes, decoders, calibration, allocation and the byte budget."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.compress.calibration.calibrate import Where as Where
    from birdie.compress.calibration.calibrate import calibrate_module as calibrate_module
    from birdie.compress.calibration.image_files import images_in as images_in
    from birdie.compress.calibration.own_model import MOST_ROWS as MOST_ROWS
    from birdie.compress.calibration.own_model import SUFFIXES as SUFFIXES
    from birdie.compress.calibration.own_model import calibrate_own as calibrate_own
    from birdie.compress.calibration.own_model import images_for as images_for
    from birdie.compress.calibration.own_model import inputs_in as inputs_in
    from birdie.compress.calibration.result import CalibrationResult as CalibrationResult
    from birdie.compress.distortion import as_near_as as as_near_as
    from birdie.compress.filling import fill as fill
    from birdie.compress.rate.assignment import match as match
    from birdie.compress.rate.assignment import parse_rules as parse_rules
    from birdie.compress.rate.target import parse_size as parse_size
    from birdie.compress.registry import decoder as decoder
    from birdie.compress.registry import parse_spec as parse_spec
    from birdie.compress.scheme import Scheme as Scheme
    from birdie.compress.scheme import StreamLayout as StreamLayout
    from birdie.compress.schemes.grid import Grid as Grid
    from birdie.compress.schemes.grid import quantiles as quantiles
    from birdie.compress.small_tensors import can_quantize as can_quantize
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
