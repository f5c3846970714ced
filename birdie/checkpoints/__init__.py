"""Other people's checkpoints: their files, folders and layouts, and the objects in them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.checkpoints.checkpoint import Checkpoint as Checkpoint
    from birdie.checkpoints.checkpoint import open_checkpoint as open_checkpoint
    from birdie.checkpoints.folder_scan import OF_TRAINING as OF_TRAINING
    from birdie.checkpoints.folder_scan import SMALL as SMALL
    from birdie.checkpoints.int8_export import FORMAT as FORMAT
    from birdie.checkpoints.int8_export import dequantize as dequantize
    from birdie.checkpoints.name_patterns import NamePatterns as NamePatterns
    from birdie.checkpoints.onnx_graph import shown as shown
    from birdie.checkpoints.pytree import holds_values as holds_values
    from birdie.checkpoints.rebuild import has_views as has_views
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
