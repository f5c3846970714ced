"""Fixtures of this folder."""

from tests.coders import fast_coder  # noqa: F401
