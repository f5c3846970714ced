"""What differs between systems."""

import os

NO_LINK = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"))
"""Flags that open no link, and do not wait for the writer of a pipe."""
