"""Hostile files are refused or harmless: short runs of the fuzzer and the bombs of `tests/hostile`."""

import contextlib

import pytest

from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.entropy import coder
from birdie.errors import ArtifactError
from tests.hostile import bombs, fuzz, seeds, targets

KINDS = (
    *("streams, payload", "streams, numbers", "streams, header", "streams, shapes", "streams, made"),
    *("artifact, payload", "artifact, shapes", "artifact, links", "tree, tree", "tree, shapes"),
    *("artifact, odd", "difference, links", "difference, tree", "chain, shapes", "chain, tree"),
    *("tiles, numbers", "tiles, made"),
)


@pytest.mark.parametrize("target", ["streams", "tree", "difference", "tiles"])
def test_mutants_are_refused_or_harmless(target: str) -> None:
    report = fuzz.run(150, 0, only=[target])
    assert report.failures == []
    outcomes = [what for what in report.counts if not what.startswith(targets.AGREEMENT)]
    assert {what.split(": ")[1] for what in outcomes} >= {"accepted", "refused"}


@pytest.mark.nightly
def test_mutants_of_every_kind_are_refused_or_harmless() -> None:
    """In a subprocess that may be killed; deeper by `python -m tests.hostile.fuzz`."""
    report = fuzz.campaign(5000, 0)
    assert report.failures == []
    assert report.tried == 5000
    for kind in KINDS:
        assert report.counts[f"{kind}: accepted"], f"no mutant of {kind} was decoded: {report}"
        assert report.counts[f"{kind}: refused"], f"no mutant of {kind} was refused: {report}"


@pytest.mark.slow
def test_small_files_cost_little() -> None:
    """Opened in a process that may take little more memory and time; at night all, and decoded."""
    bombs.run("--only", "4 GiB")


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
def test_the_fuzzer_has_a_seed_for_every_kind_scheme_and_coder() -> None:
    kinds, schemes, coders = set(), set(), set()
    with seeds.short_chunks():
        for seed in (*seeds.streams(), *seeds.artifacts()):
            kinds |= {entry.kind for entry in seed.entries}
            schemes |= {entry.scheme for entry in seed.entries if entry.kind == container.TENSOR}
            coders |= {stream.coder for entry in seed.entries for stream in entry.streams}
    assert kinds == {*range(len(container.KINDS))}
    assert schemes == {*SCHEMES}
    assert coders == set(coder.NAMES)
