"""What stands in a one-file decoder where it leaves a coder or a scheme out."""

from typing import NoReturn

from birdie.errors import ArtifactError


def refuse(*what: object) -> NoReturn:  # noqa: ARG001 (in the place of any coder)
    """Raise ArtifactError; unlike all others it keeps its words."""
    raise ArtifactError("this file needs the larger decoder: birdie decoder --coder max")


def refuse_spectral(*what: object) -> NoReturn:  # noqa: ARG001
    """The same where no larger one would do."""
    raise ArtifactError("this file needs birdie")


refuse.layout = refuse  # type: ignore[attr-defined]  # in the place of any scheme's decoder
refuse_spectral.layout = refuse_spectral  # type: ignore[attr-defined]
