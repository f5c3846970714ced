"""Fixtures of this folder."""

from tests.coders import fast_coder  # noqa: F401
from tests.compress.conftest import one_thread, squares  # noqa: F401
