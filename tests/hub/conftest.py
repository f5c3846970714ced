"""The tests of models of other libraries save with the fast coder unless they name another."""

from tests.coders import fast_coder  # noqa: F401
