"""What stands in the decoder for "fast" where it leaves a coder or a scheme out."""

from typing import NoReturn

from birdie.errors import ArtifactError


def refuse(*what: object) -> NoReturn:  # noqa: ARG001 (in the place of any coder)
    """Raise ArtifactError; unlike all others it keeps its words."""
    raise ArtifactError("this file needs the larger decoder: birdie decoder --coder max")


refuse.layout = refuse  # type: ignore[attr-defined]  # in the place of any scheme's decoder
