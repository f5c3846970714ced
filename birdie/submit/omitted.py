"""What stands in the decoder for "fast" where it leaves a coder out."""

from typing import NoReturn

from birdie.errors import ArtifactError


def refuse(*what: object) -> NoReturn:  # noqa: ARG001 (in the place of any coder)
    """Raise ArtifactError; unlike all others it keeps its words."""
    raise ArtifactError("this file needs the larger decoder: birdie decoder --coder max")
