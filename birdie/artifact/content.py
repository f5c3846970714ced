"""Content of a file: the tensors of a model, and all that is kept beside them.

module or state dict, metadata, kept files ──► Content ──with an assignment──► Beside ──► model.birdie
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from birdie.artifact import kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.state_dict import kept_beside
from birdie.artifact.write import Beside, lossless_entries
from birdie.checkpoints.limits import require_count, require_names
from birdie.checkpoints.stored_order import order_field
from birdie.compress.exact import Roles
from birdie.compress.rate.assignment import Assignment
from birdie.compress.state import ModelState, keys_of
from birdie.entropy.hints import Effort


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
        onnx: Sequence[Any] | None = None,
        roles: Roles | None = None,
    ) -> "Content":
        """Return the content of a file of a module without wrappers, or of a state dict.

        Args:
            model, metadata, files, tree, link, onnx: as for `birdie.artifact.saving.write_model`.
            rebase, roles: as of `ModelState.of`.

        Raises:
            WeightsError: two tensors have one name, or an extra state cannot be stored.
            ConfigError: a file has no room for so many tensors.
        """
        state = ModelState.of(model, rebase=rebase, roles=roles)
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
            "onnx": onnx,
            "order": order_field(keys_of(model), parts),
        }
        return cls(state, extra, about, kept)

    def without_files(self, names: Collection[str]) -> "Content":
        """Return the content without some of the files."""
        left = {name: data for name, data in self.files.items() if name not in names}
        return replace(self, about={**self.about, "files": kept_files.sizes_of(left)}, files=left)

    def beside(self, assignment: Assignment, effort: Effort, budget: int | None, base: Any = None) -> Beside:
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
