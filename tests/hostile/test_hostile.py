"""Hostile files are refused or harmless: short runs of the fuzzer and the bombs of `tests/hostile`."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.entropy import coder
from birdie.errors import ArtifactError
from tests.hostile import bombs, fuzz, seeds

KINDS = (
    *("streams, payload", "streams, numbers", "streams, header", "streams, shapes", "streams, made"),
    *("artifact, payload", "artifact, shapes", "artifact, links", "tree, tree", "tree, shapes"),
)


@pytest.mark.slow
def test_mutants_are_refused_or_harmless() -> None:
    """Some seconds in a subprocess that may be killed; deeper by `python -m tests.hostile.fuzz`."""
    report = fuzz.campaign(800, 0)
    assert report.failures == []
    assert report.counts.total() == 800
    for kind in KINDS:
        assert report.counts[f"{kind}: accepted"], f"no mutant of {kind} was decoded: {report}"
        assert report.counts[f"{kind}: refused"], f"no mutant of {kind} was refused: {report}"


def test_a_decoder_that_breaks_is_told_with_the_number_of_the_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer notices the failures that it is meant to find."""
    target = fuzz.TARGETS["tree"]
    sound = [seed.data for seed in target.sound()]

    def broken(data: bytes, _: Path) -> None:
        if data not in sound:
            raise IndexError("past the end")

    monkeypatch.setattr(fuzz, "TARGETS", {"tree": replace(target, decode=broken)})
    report = fuzz.run(1, 1000)
    assert report.failures[0].startswith("mutant 1000:")
    assert "past the end" in report.failures[0]


@pytest.mark.slow
def test_small_files_cost_little() -> None:
    """Opened (and decoded) in a process that may take little more memory than it decodes to, and little time."""
    bombs.run("--every", "50")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(), ("--one-file",)], ids=["birdie", "one-file decoder"])
def test_every_small_file_costs_little(options: tuple[str, ...]) -> None:
    bombs.run(*options)


@pytest.mark.nightly
def test_there_is_a_bomb_for_every_scheme_and_every_coder() -> None:
    schemes, coders = set(), set()
    for name, bomb in bombs.BOMBS.items():
        if name.startswith("131,072"):  # seconds to make, and of a scheme that others have
            continue
        with contextlib.suppress(ArtifactError), container.Reader(bomb()) as reader:
            for tensor in reader.names[:1]:
                schemes.add(reader.entry(tensor).scheme)
                coders |= {stream.coder for stream in reader.entry(tensor).streams}
    assert schemes >= set(SCHEMES)
    assert coders >= set(coder.NAMES)


@pytest.mark.nightly
def test_the_fuzzer_has_a_seed_for_every_scheme_and_every_coder() -> None:
    schemes, coders = set(), set()
    with seeds.short_chunks():
        for seed in (*seeds.streams(), *seeds.artifacts()):
            schemes |= {entry.scheme for entry in seed.entries}
            coders |= {stream.coder for entry in seed.entries for stream in entry.streams}
    assert schemes == {container.ALIAS, container.BLOCKS, container.FILES, *SCHEMES}
    assert coders == set(coder.NAMES)
