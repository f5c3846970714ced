"""Verification of a file: every entry is read, its checksum compared, and decoded; nothing is kept."""

from birdie.artifact import kept_files
from birdie.artifact.file import File
from birdie.artifact.links import opened
from birdie.artifact.options import Limits
from birdie.compress import registry
from birdie.errors import ArtifactError
from birdie.system.callbacks import Progress
from birdie.system.file_objects import Input, source_of


def damaged_tensors(path: Input, limits: Limits, progress: Progress | None = None) -> dict[str, str]:
    """Decode every tensor of a file, one after the other, and return what is wrong with those that cannot be.

    Args:
        path: a .birdie file, its bytes, or a binary file object.
        limits: of the decoding, and the base of a file of deltas.
        progress: called with (done, total) in tensors.

    Returns:
        Name → sentence; empty if the file is intact.

    Raises:
        ArtifactError: the header or the kept files are damaged, or decoding is beyond the limits.
        ConfigError: the file needs another base.
    """
    source, damage = source_of(path), dict[str, str]()
    registry.import_schemes(limits.schemes)
    with opened(source, limits) as base, File(source, registry.decoder, base) as file:
        file.require(limits.max_bytes, limits.max_operations)
        kept_files.read_all(file, None if base is None else base.kept(), limits.max_bytes)
        names: dict[str, list[str]] = {}
        for name in file.ordered:
            names.setdefault(file.holder(file.stored(name)), []).append(name)
        for done, (holder, held) in enumerate(names.items(), 1):
            try:
                for block, _ in file.parts(holder):
                    file.decode_entry(block, limits.workers)
            except ArtifactError as error:
                damage |= dict.fromkeys(held, str(error))
            if progress is not None:
                progress(done, len(names))
    return damage
