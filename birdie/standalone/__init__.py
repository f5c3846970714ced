"""birdie as one file: decoders and the programs that hold a model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.standalone.code_size import C_DECODER as C_DECODER
    from birdie.standalone.code_size import PACKAGE as PACKAGE
    from birdie.standalone.code_size import SCRIPT as SCRIPT
    from birdie.standalone.code_size import behind as behind
    from birdie.standalone.code_size import code_bytes as code_bytes
    from birdie.standalone.code_size import source_files as source_files
    from birdie.standalone.web_decoder import DECODER as DECODER
    from birdie.standalone.web_decoder import PAGE_PROGRAM as PAGE_PROGRAM
    from birdie.standalone.web_decoder import PROGRAM as PROGRAM
    from birdie.standalone.web_decoder import javascript_decoder as javascript_decoder
    from birdie.standalone.web_decoder import joined as joined
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
