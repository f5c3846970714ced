"""Functions that a one-file decoder has instead of the coders and schemes it leaves out: all refuse, in words."""

from typing import NoReturn

from birdie.errors import ArtifactError


def needs_max(scheme: str) -> NoReturn:
    """Raise ArtifactError for a coder or a scheme that only the larger decoder includes."""
    raise ArtifactError(f"this file needs {scheme}; use the decoder that birdie decoder --coder max writes")


def needs_context_mixing(*_: object) -> NoReturn:
    """Raise ArtifactError for streams of context mixing."""
    needs_max("context mixing")


def needs_birdie(scheme: str) -> NoReturn:
    """Raise ArtifactError for a scheme that neither decoder includes."""
    raise ArtifactError(f"this file needs {scheme}; use birdie")
