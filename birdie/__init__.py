"""birdie trains, compresses, packs and scores models under a byte budget.

    import birdie

    birdie.save(model, "model.birdie", budget=16_000_000)
    state = birdie.load("model.birdie")
    birdie.inspect("model.birdie").bits_per_weight

Names are imported when they are first used, so that `import birdie` costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie import onnx as onnx
    from birdie import schemes as schemes
    from birdie.artifact.device_file import load_compressed as load_compressed
    from birdie.artifact.folders import files as files
    from birdie.artifact.in_memory import compress_weights as compress_weights
    from birdie.artifact.in_memory import load_weights as load_weights
    from birdie.artifact.in_memory import quantize_ as quantize_
    from birdie.artifact.inspection import inspect as inspect
    from birdie.artifact.loading import load as load
    from birdie.artifact.repack import load_object as load_object
    from birdie.artifact.repack import save_object as save_object
    from birdie.artifact.saving import save as save
    from birdie.artifact.size_curve import Curve as Curve
    from birdie.artifact.size_curve import curve as curve
    from birdie.artifact.summary import Summary as Summary
    from birdie.compress.calibration.calibrate import calibrate as calibrate
    from birdie.compress.calibration.table import sensitivity as sensitivity
    from birdie.compress.device.compressed import compressed_linear as compressed_linear
    from birdie.errors import ArtifactError as ArtifactError
    from birdie.errors import BirdieError as BirdieError
    from birdie.errors import BudgetError as BudgetError
    from birdie.errors import ConfigError as ConfigError
    from birdie.errors import DataError as DataError
    from birdie.errors import OutputError as OutputError
    from birdie.errors import RuleError as RuleError
    from birdie.errors import WeightsError as WeightsError
    from birdie.gpt.train.muon import Muon as Muon
    from birdie.hub.pipelines import pipeline as pipeline
    from birdie.hub.pipelines import tokenizer as tokenizer
    from birdie.hub.pretrained import from_pretrained as from_pretrained
    from birdie.small.fine_tuning import FineTuneStep as FineTuneStep
    from birdie.small.fine_tuning import fine_tune as fine_tune
    from birdie.small.qat.stored_weights import plain as plain
    from birdie.small.spectral.wrap import SpectralTraining as SpectralTraining
    from birdie.small.spectral.wrap import leaky_floor as leaky_floor
    from birdie.small.spectral.wrap import quantization_loss as quantization_loss
    from birdie.small.spectral.wrap import spectral as spectral
    from birdie.system.provenance import __version__ as __version__
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
