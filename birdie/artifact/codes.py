"""Scheme codes: the numbers by which a file refers to schemes.

Schemes that ship with birdie have fixed codes from 1 to 127, written in their modules. A foreign scheme (one that
another package defines) has no fixed code: a file numbers those it uses from 128 on and names them in its metadata,
"schemes": {"128": NAME}.
"""

from collections.abc import Iterable, Mapping

from birdie.artifact.container import MAX_CODE, Entry
from birdie.artifact.decoding import DecoderOf
from birdie.artifact.inspect import scheme_name
from birdie.compress import registry
from birdie.compress.scheme import Decoder
from birdie.errors import ConfigError

FIRST_FOREIGN = registry.MAX_CODE + 1


def scheme_codes(names: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return name → code of every scheme that a file may use, and code → name of the foreign ones for its metadata.

    The same names give the same codes.
    """
    builtin = {name: code for code, name in registry.own_names_by_code().items()}
    foreign = sorted(set(names) - set(builtin))
    if FIRST_FOREIGN + len(foreign) > MAX_CODE:
        raise ConfigError(
            f"a file can use {MAX_CODE - FIRST_FOREIGN} schemes from outside birdie, not {len(foreign)}; use fewer"
        )
    codes = {name: FIRST_FOREIGN + index for index, name in enumerate(foreign)}
    return builtin | codes, {str(code): name for name, code in codes.items()}


def registered_decoders(foreign: Mapping[str, str]) -> DecoderOf:
    """Return the look-up of decoders for a file whose metadata names these foreign schemes."""

    def decoder_of(entry: Entry) -> Decoder:
        return registry.decoder(scheme_name(entry, foreign))

    return decoder_of
