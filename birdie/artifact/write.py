"""Coded tensors and what a file has beside them: entries of the container."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import scheme_codes
from birdie.artifact.container import ALIAS, BLOCKS, DELTA, MEMBER, TENSOR, Entry, block_name
from birdie.artifact.file import DTYPES
from birdie.compress import registry
from birdie.compress.coding import Coded, code
from birdie.compress.rate.assignment import Group
from birdie.compress.scheme import DELTA as FORM
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState, problem_of, unstorable
from birdie.entropy.hints import Effort
from birdie.system.outputs import Source


@dataclass(frozen=True, slots=True)
class Beside:
    """All that a file has beside its tensors.

    Attributes:
        about: the metadata, arguments of `birdie.artifact.metadata.to_bytes`.
        hidden: entries beside the tensors.
        groups: name of a tensor → the tensors of the file that it consists of.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    hidden: Sequence[Entry] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)

    def content(self, state: EncodedState) -> tuple[list[Entry], bytes]:
        """Return the entries and the metadata of the file that holds these coded tensors."""
        tensors = dict(_parts(state))
        codes, foreign = scheme_codes({tensor.scheme for tensor in tensors.values()} - {FORM}, _number_of)
        entries = [*self.hidden]
        for name, tensor in tensors.items():
            kind, scheme = (DELTA, 0) if tensor.scheme == FORM else (TENSOR, codes[tensor.scheme])
            coded = tensor.shape, tensor.params, tensor.streams
            entries.append(Entry(name, scheme, DTYPES.index(tensor.dtype), *coded, crc=tensor.crc, kind=kind))
        kinds = {name: (DTYPES.index(tensor.dtype), tensor.shape) for name, tensor in state.tensors.items()}
        entries += [Entry(name, 0, *kinds[name], kind=BLOCKS) for name in state.tensors if name not in tensors]
        for group, members in self.groups.items():
            if group in kinds:
                kinds |= dict.fromkeys(members.names, (kinds[group][0], members.shape))
                entries += [Entry(name, 0, *kinds[name], target=group, kind=MEMBER) for name in members.names]
        entries += [Entry(name, 0, *kinds[first], target=first, kind=ALIAS) for name, first in state.ties.items()]
        return entries, file_metadata.to_bytes(**self.about, schemes=foreign)

    def size(self, state: EncodedState) -> int:
        """Return the bytes of that file."""
        return container.file_bytes(*self.content(state))

    def write(self, path: Source | BytesIO, state: EncodedState, check: Callable[[Path], None] | None = None) -> None:
        """Write that file, completely or not at all; `check` as of `birdie.artifact.container.write`."""
        container.write(path, *self.content(state), check)


def lossless_entries(tensors: Mapping[str, Tensor], effort: Effort) -> list[Entry]:
    """Return entries that keep every bit of some tensors."""
    for name, tensor in tensors.items():
        if problem := problem_of(tensor):
            raise unstorable(name, problem)
    coded = {name: code(Lossless().encode(name, tensor.detach().cpu()), effort) for name, tensor in tensors.items()}
    return Beside().content(EncodedState(coded, {}))[0]


def _number_of(foreign: str) -> int:
    return registry.decoder(foreign).number


def _parts(state: EncodedState) -> Iterator[tuple[str, Coded]]:
    """Yield the entries of the file that have streams: tensors, and blocks of tensors."""
    for name, tensor in state.tensors.items():
        assert isinstance(tensor, Coded)
        if tensor.parts:
            yield from ((block_name(name, index), part) for index, part in enumerate(tensor.parts))
        else:
            yield name, tensor
