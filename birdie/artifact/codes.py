"""Scheme codes: the numbers by which a file refers to schemes.

Schemes that ship with birdie have fixed codes from 1 to 127, written in their modules. A foreign scheme (one that
another package defines) has no fixed code: a file numbers those it uses from 128 on and names them in its metadata,
"schemes": {"128": NAME}.
"""

from collections.abc import Iterable, Mapping

from birdie.artifact.container import ALIAS, MAX_CODE, Entry
from birdie.artifact.decoding import DecoderOf
from birdie.compress import registry
from birdie.compress.scheme import Decoder
from birdie.compress.schemes.cast import CAST_NAMES
from birdie.errors import ArtifactError, ConfigError

FIRST_FOREIGN = registry.MAX_CODE + 1


def scheme_codes(names: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return name → code of every scheme that a file may use, and code → name of the foreign ones for its metadata.

    The same names give the same codes.

    Raises:
        ConfigError: there are more foreign schemes than codes.
    """
    builtin = {name: code for code, name in registry.own_names_by_code().items()}
    foreign = sorted(set(names) - set(builtin))
    if FIRST_FOREIGN + len(foreign) > MAX_CODE:
        raise ConfigError(
            f"a file can use {MAX_CODE - FIRST_FOREIGN} schemes from outside birdie, not {len(foreign)}; use fewer"
        )
    codes = {name: FIRST_FOREIGN + index for index, name in enumerate(foreign)}
    return builtin | codes, {str(code): name for name, code in codes.items()}


def scheme_name(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme.

    Raises:
        ArtifactError: its code is neither one of birdie's nor named in the file.
    """
    name = registry.own_names_by_code().get(entry.scheme) or foreign.get(str(entry.scheme))
    if name is None:
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown to this version; update birdie"
        )
    return name


def stored_as(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme in summaries: fp16 and bf16 for casts, alias for a second name."""
    if entry.scheme == ALIAS:
        return "alias"
    name = scheme_name(entry, foreign)
    return CAST_NAMES.get(entry.params, name) if name == "cast" else name


def registered_decoders(foreign: Mapping[str, str]) -> DecoderOf:
    """Return the look-up of decoders for a file whose metadata names these foreign schemes."""

    def decoder_of(entry: Entry) -> Decoder:
        return registry.decoder(scheme_name(entry, foreign))

    return decoder_of
