"""Values that a one-file decoder has instead of the coders and schemes it leaves out: all refuse, in words."""

from typing import NoReturn

from birdie.compress.scheme import Decoder
from birdie.errors import ArtifactError


def needs_max(*_: object) -> NoReturn:
    """Raise ArtifactError for a coder or a scheme that only the larger decoder includes."""
    raise ArtifactError("this file needs the larger decoder: birdie decoder --coder max")


def needs_birdie(*_: object) -> NoReturn:
    """Raise ArtifactError for a scheme that neither decoder includes."""
    raise ArtifactError("this file needs birdie")


# Two statements, for a bundle includes whole statements.
NEEDS_MAX = Decoder("", None, needs_max, needs_max)
NEEDS_BIRDIE = Decoder("", None, needs_birdie, needs_birdie)
