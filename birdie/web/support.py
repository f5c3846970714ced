"""Files that a page decodes: which they are, and why another one is none."""

from birdie.artifact import DELTA, TENSOR, Entry, Reader, scheme_name
from birdie.artifact import SCHEMES as OWN
from birdie.checkpoints import has_views
from birdie.entropy import NAMES as CODERS
from birdie.system.outputs import Source

SCHEMES = {number: name for number, name in OWN.items() if number <= 8}
"""Number → name of the schemes in page.wasm, those up to lowrank (BIRDIE_SMALL in birdie.c); it has every coder."""


def unsupported(source: Source | bytes) -> str | None:
    """Return why a page cannot decode a file, in one sentence; None if it can.

    Args:
        source: a path, or the bytes of a file. Its header is read, nothing is decoded.

    Raises:
        ArtifactError: the file is missing, or its header is damaged.
    """
    with Reader(source) as reader:
        if has_views(reader.fields.get("tree")):
            return f"{reader.where} holds views of tensors, which pages do not decode"
        for name in reader.entries:
            entry = reader.entry(name)
            if problem := _problem(entry, reader):
                tensor = name.strip("\0").partition("\0")[0]
                return f"tensor {tensor!r} of {reader.where} {problem}, which pages do not decode"
    return None


def _problem(entry: Entry, reader: Reader) -> str | None:
    if entry.kind == DELTA:
        return "is a delta, relative to another tensor"
    if entry.kind == TENSOR and entry.scheme not in SCHEMES:
        foreign = {} if entry.scheme in OWN else reader.fields.get("schemes", {})
        return f"has the scheme {scheme_name(entry, foreign)}"
    unknown = [stream.coder for stream in entry.streams if stream.coder not in CODERS]
    return f"has the coder {unknown[0]}" if unknown else None
