"""Content of a file: the tensors of a model, and all that is kept beside them.

module or state dict, metadata, kept files ──► Content ──with an assignment──► Beside
coded tensors ──► entries of the container, with those of Beside ──► model.birdie
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from birdie.artifact import container, kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import scheme_codes
from birdie.artifact.container import ALIAS, BLOCKS, DELTA, MEMBER, TENSOR, Entry, block_name
from birdie.artifact.file import DTYPES
from birdie.artifact.state_dict import kept_beside
from birdie.checkpoints.limits import require_count, require_names
from birdie.checkpoints.stored_order import order_field
from birdie.compress import registry
from birdie.compress.coding import Coded, code
from birdie.compress.rate.assignment import Assignment, Group
from birdie.compress.scheme import DELTA as FORM
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState, ModelState, keys_of, problem_of, unstorable
from birdie.entropy.hints import Effort
from birdie.system.outputs import Source


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a file: a model and all that is kept beside it."""

    state: ModelState  # its tensors
    extra: Mapping[str, Tensor]  # tensors of extra states, by name
    about: Mapping[str, Any]  # arguments of `birdie.artifact.metadata.to_bytes` that no assignment changes
    files: Mapping[str, bytes]  # name → content of the files kept beside the tensors

    @classmethod
    def of(
        cls,
        model: nn.Module | Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None,
        files: Mapping[str, bytes] | None,
        tree: Any = None,
        link: Mapping[str, Any] | None = None,
        *,
        rebase: bool = False,
    ) -> "Content":
        """Return the content of a file of a module without wrappers, or of a state dict.

        Args:
            model, metadata, files, tree, link: as for `birdie.artifact.saving.write_model`.
            rebase: as of `ModelState.of`.

        Raises:
            WeightsError: two tensors have one name, or an extra state cannot be stored.
            ConfigError: a file has no room for so many tensors.
        """
        state = ModelState.of(model, rebase=rebase)
        require_names(state.by_name)
        extra, about_state = kept_beside(model)
        parts = {
            key: [name for name in extra if name.startswith(f"{key}/")] for key in (about_state or {}).get("extra", ())
        }
        kept = files or {}
        about = {
            "metadata": metadata,
            "tree": tree,
            "files": kept_files.sizes_of(kept),
            "state": about_state,
            "link": link,
            "order": order_field(keys_of(model), parts),
        }
        return cls(state, extra, about, kept)

    def beside(self, assignment: Assignment, effort: Effort, budget: int | None, base: Any = None) -> "Beside":
        """Return what a file of an assignment has beside its tensors.

        Args:
            assignment: of the tensors.
            effort: of the entropy coder.
            budget: bytes the file may have.
            base: field of the metadata.

        Raises:
            ConfigError: the metadata is no JSON, or a file has no room for so many tensors and groups of them.
        """
        require_count(len(self.state.by_name) + len(assignment.groups))
        copies = file_metadata.copies_of(assignment.ties, assignment.copies)
        about = {**self.about, "budget": budget, "copies": copies, "base": base}
        file_metadata.to_bytes(**about)  # what is no JSON raises here, before long work
        hidden = [kept_files.entry_of(self.files)] if self.files else []
        return Beside(about, [*hidden, *lossless_entries(self.extra, effort)], assignment.groups)


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
