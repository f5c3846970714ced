"""Parsing of sizes such as 16MB. Units are decimal unless binary: 16MB is 16,000,000; 16MiB is 16,777,216."""

import re
from decimal import Decimal

from birdie.errors import ConfigError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of "16MB", "1.5 MiB" or "250000", rounded down."""
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].lower() not in UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes (250000) or a unit: kB, MB, GB, KiB, MiB, GiB")
    size = int(Decimal(re.sub("[_,]", "", match[1])) * UNITS[match[2].lower()])
    if not 1 <= size < 2**63:
        raise ConfigError(f"size {text[:40]!r} is out of range; give one above zero and below 2^63 bytes")
    return size
