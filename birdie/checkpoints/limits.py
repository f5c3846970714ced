"""Room in a .birdie file for the tensors of a checkpoint, asked before anything long begins."""

from collections.abc import Collection

from birdie.errors import ConfigError

MAX_ENTRIES = 1 << 17
MAX_NAMES_BYTES = 1 << 24  # of all names together
MAX_NAME_BYTES = 1 << 12
MAX_DIMS = 16


def name_bytes(name: str) -> bytes:
    """Return a name as UTF-8."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"tensor name {name!r} is not valid text; rename it") from None


def require_names(names: Collection[str]) -> None:
    """Check that a file has room for tensors of these names."""
    require_count(len(names))
    if sum(len(name_bytes(name)) for name in names) > MAX_NAMES_BYTES:
        raise ConfigError(f"the names of all tensors have more than {MAX_NAMES_BYTES:,} bytes; shorten them")


def require_count(count: int) -> None:
    """Check that a file has room for so many tensors."""
    if count > MAX_ENTRIES:
        raise ConfigError(f"a .birdie file holds at most {MAX_ENTRIES:,} tensors, not {count:,}; split the model")
