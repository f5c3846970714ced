"""Retention: which checkpoints of a chain go when a user asks for fewer.

    --drop 20 --drop last.ckpt            those go
    --keep-last 5 --keep-every 100        those of the last five steps and of every hundredth stay, all others go

A checkpoint that is known by its name goes only if it is named.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from birdie.artifact.links import Link
from birdie.chain.chain_folder import Chain
from birdie.chain.chain_rows import Row
from birdie.errors import ConfigError


def retain(
    chain: Chain, *, drop: Sequence[str] = (), keep_last: int | None = None, keep_every: int | None = None
) -> list[Row]:
    """Remove checkpoints from a chain, and return their rows; those that stay are restored bit for bit as before.

    Args:
        chain: to remove from.
        drop: steps, or names of checkpoints without one.
        keep_last: so many checkpoints with the highest steps stay.
        keep_every: those stay whose step is a multiple of this.

    Raises:
        ConfigError: a number is below 1, there is no such checkpoint, none would remain, or another process writes
            into the chain.
        ArtifactError: a link that stays needs one that is damaged.
    """

    def choose(links: Mapping[str, Link]) -> set[str]:
        if not links:
            raise ConfigError(f"{chain.folder} holds no link of a chain; give the folder that birdie compress wrote")
        names = {name for one in drop for name in _named(one, links, chain.folder)}
        if keep_last is not None or keep_every is not None:
            names |= {*links} - _kept(links, keep_last, keep_every)
        return names

    return chain.drop(choose)


def _named(text: str, links: Mapping[str, Link], folder: Path) -> list[str]:
    """Return the links of a step, or else of the checkpoint with a name."""
    if text.isdecimal() and text.isascii():
        names = [name for name, link in links.items() if link.step == int(text) and not link.is_named]
    else:
        names = [name for name, link in links.items() if link.is_named and text in (link.name, name)]
    if names:
        return names
    steps = sorted(link.step for link in links.values() if not link.is_named)
    others = [link.name for link in links.values() if link.is_named]
    known = ([f"steps {steps[0]} to {steps[-1]}"] if steps else []) + others
    raise ConfigError(f"{folder} has no checkpoint {text!r} to drop; it has {', '.join(known)}")


def _kept(links: Mapping[str, Link], last: int | None, every: int | None) -> set[str]:
    """Return the links that stay: of the last steps, of every so many, and those that are known by their names."""
    for option, number in {"keep-last (keep_last)": last, "keep-every (keep_every)": every}.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{option} is {number}; give a number of at least 1")
    steps = sorted({link.step for link in links.values() if not link.is_named})
    stay = {step for step in steps if every is not None and step % every == 0}
    stay |= {*steps[-last:]} if last is not None else set()
    return {name for name, link in links.items() if link.is_named or link.step in stay}
