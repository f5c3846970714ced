"""Fixtures of these tests: the fast coder, a scheme from outside birdie, and a single thread."""

from tests.coders import fast_coder  # noqa: F401
from tests.compress.conftest import one_thread, squares  # noqa: F401
