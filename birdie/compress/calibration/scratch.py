"""Folders of a blockwise calibration: a temporary one that lives as long as its result, or one that is named."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from birdie.system.distributed import World, together
from birdie.system.files import temporary_folder
from birdie.system.outputs import Source, require_writable


class Scratch:
    """Temporary folder of all ranks, which rank 0 removes when nobody refers to this object any more.

    Args:
        parent: folder to create it in.
        world: the ranks.

    Attributes:
        path: of the folder.
        close: removes it now.
    """

    def __init__(self, parent: Path, world: World) -> None:
        stack, path = ExitStack(), [""]

        def create() -> None:
            if world.is_main:
                path[0] = str(stack.enter_context(temporary_folder(require_writable(parent))))

        together(world, create)
        self.path = Path(world.broadcast(path[0]))
        self.close = weakref.finalize(self, stack.close)


@contextmanager
def work_folder(path: Source, blockwise: bool | Source, world: World | None) -> Iterator[Source | None]:
    """Yield the folder of a blockwise calibration, None if there is no such calibration.

    Args:
        path: of a file; a temporary folder is beside it.
        blockwise: the folder; True: a temporary one; False: none.
        world: ranks that use it.
    """
    if not isinstance(blockwise, bool):
        yield blockwise
        return
    if not blockwise:
        yield None
        return
    scratch = Scratch(Path(path).parent, world or World())
    try:
        yield scratch.path / "calibration"
    finally:
        scratch.close()
