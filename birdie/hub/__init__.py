"""Hugging Face: models ready to use from .birdie files, and folders for the Hub. Libraries are imported when needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.hub.data_calibration import TOKENS as TOKENS
    from birdie.hub.data_calibration import calibrate_on_images as calibrate_on_images
    from birdie.hub.data_calibration import calibrate_on_text as calibrate_on_text
    from birdie.hub.folder import write_birdie_folder as write_birdie_folder
    from birdie.hub.generation import TextModel as TextModel
    from birdie.hub.generation import keeps_configuration as keeps_configuration
    from birdie.hub.library_loading import is_of_library as is_of_library
    from birdie.hub.library_loading import require_transformers_folder as require_transformers_folder
    from birdie.hub.made_up import calibrate_without_data as calibrate_without_data
    from birdie.hub.made_up import reason_of as reason_of
    from birdie.hub.registration import register as register
    from birdie.hub.transfer import download as download
    from birdie.hub.transfer import push as push
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
