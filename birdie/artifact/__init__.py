"""The .birdie file: container, writer, reader, saving and loading models, and readers of other checkpoints."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.artifact.coded_file import write_parameters as write_parameters
    from birdie.artifact.codes import SCHEMES as SCHEMES
    from birdie.artifact.codes import scheme_name as scheme_name
    from birdie.artifact.comparison import TensorComparison as TensorComparison
    from birdie.artifact.comparison import compare as compare
    from birdie.artifact.container import ALIAS as ALIAS
    from birdie.artifact.container import DELTA as DELTA
    from birdie.artifact.container import KIND as KIND
    from birdie.artifact.container import MAGIC as MAGIC
    from birdie.artifact.container import MEMBER as MEMBER
    from birdie.artifact.container import TENSOR as TENSOR
    from birdie.artifact.container import Entry as Entry
    from birdie.artifact.container import Reader as Reader
    from birdie.artifact.file import File as File
    from birdie.artifact.file_forecast import LOSSLESS as LOSSLESS
    from birdie.artifact.file_forecast import forecast as forecast
    from birdie.artifact.folders import holds_folder as holds_folder
    from birdie.artifact.folders import write_folder as write_folder
    from birdie.artifact.inspection import inspect as inspect
    from birdie.artifact.inspection import load_seconds as load_seconds
    from birdie.artifact.inspection import stored_as as stored_as
    from birdie.artifact.links import is_link as is_link
    from birdie.artifact.links import link_paths as link_paths
    from birdie.artifact.links import read_link as read_link
    from birdie.artifact.loading import load as load
    from birdie.artifact.onnx_export import ONNX as ONNX
    from birdie.artifact.onnx_export import graph_of as graph_of
    from birdie.artifact.onnx_export import write_onnx as write_onnx
    from birdie.artifact.options import COMBINATIONS as COMBINATIONS
    from birdie.artifact.options import Limits as Limits
    from birdie.artifact.options import SaveOptions as SaveOptions
    from birdie.artifact.options import chosen as chosen
    from birdie.artifact.output_form import form_of as form_of
    from birdie.artifact.output_form import form_of_weights as form_of_weights
    from birdie.artifact.repack import load_object as load_object
    from birdie.artifact.repack import write_checkpoint as write_checkpoint
    from birdie.artifact.safetensors_export import to_safetensors as to_safetensors
    from birdie.artifact.saving import save as save
    from birdie.artifact.size_curve import Curve as Curve
    from birdie.artifact.size_curve import FoundFile as FoundFile
    from birdie.artifact.size_curve import Measurements as Measurements
    from birdie.artifact.size_curve import SizePoint as SizePoint
    from birdie.artifact.size_curve import checkpoint_curve as checkpoint_curve
    from birdie.artifact.size_curve import curve as curve
    from birdie.artifact.size_curve import require_search as require_search
    from birdie.artifact.summary import Summary as Summary
    from birdie.artifact.summary import TensorSummary as TensorSummary
    from birdie.artifact.summary_table import SummaryTable as SummaryTable
    from birdie.artifact.summary_table import by_scheme as by_scheme
    from birdie.artifact.summary_table import by_tensor as by_tensor
    from birdie.artifact.verification import damaged_tensors as damaged_tensors
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
