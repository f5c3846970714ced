"""Quantizer of transformers that loads birdie folders: import this module, or call `birdie.hub.register`.

    config.json: quantization_config {"quant_method": "birdie", "file": "model.birdie"}
    AutoModel.from_pretrained(folder) ──► model.safetensors, empty, is replaced by what model.birdie decodes to

transformers looks for a file of weights before it asks a quantizer, so a birdie folder has an empty one.
"""

import tempfile
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from birdie.artifact.folders import SHARD, write_folder
from birdie.errors import ConfigError
from birdie.hub.pretrained import WEIGHTS
from birdie.system.names import is_name

METHOD = "birdie"


@register_quantization_config(METHOD)
class BirdieConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a birdie folder.

    Args:
        file: of the weights, in the folder.
        about: what else config.json says, for people: bytes, bits.
    """

    def __init__(self, file: str = WEIGHTS, **about: Any) -> None:
        self.quant_method = METHOD
        self.file = file
        for name, value in about.items():
            setattr(self, name, value)


@register_quantizer(METHOD)
class BirdieQuantizer(HfQuantizer):  # type: ignore[misc]
    """Decodes the weights before transformers reads them; afterwards the model is an ordinary one."""

    requires_calibration = True  # it loads, and does not quantize

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        folder = Path(checkpoint_files[0]).parent
        if not is_name(self.quantization_config.file):
            raise ConfigError(
                f"config.json names the weights {self.quantization_config.file!r}, which is no file of it"
            )
        file = folder / self.quantization_config.file
        if not file.is_file():  # in the cache of the Hub, which holds what was asked for
            from huggingface_hub import hf_hub_download

            revision = getattr(model.config, "_commit_hash", None)
            file = Path(hf_hub_download(model.config._name_or_path, self.quantization_config.file, revision=revision))
        self._decoded = tempfile.TemporaryDirectory(prefix="birdie-")
        decoded = Path(self._decoded.name) / "model"
        write_folder(file, decoded, max_shard_bytes=SHARD)
        checkpoint_files[:] = sorted(map(str, decoded.glob("*.safetensors")))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self._decoded.cleanup()
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        """Return whether the model can be saved: as an ordinary one."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return whether the model can be trained: as an ordinary one."""
        return True
