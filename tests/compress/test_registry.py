"""The registry: every spelling of a scheme, what the error of a wrong one says, and schemes from outside birdie."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from birdie.compress import registry
from birdie.compress.rate.assignment import parse_rules
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Decoder, Encoded, Scheme, Sensitivity, Spec
from birdie.compress.schemes import grid, numbers
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.rotation import Rotation
from birdie.compress.schemes.spectral import Spectral
from birdie.compress.schemes.ternary import Ternary
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.schemes.tucker import Tucker
from birdie.compress.spectral.transforms import Transform
from birdie.errors import ArtifactError, ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "schemes.md"


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("lossless", Lossless()),
        ("fp16", Cast("fp16")),
        (" bf16 ", Cast("bf16")),
        ("int8", Grid(bits=8)),
        ("int2", Grid(bits=2)),
        ("int4:group_size=64", Grid(bits=4, group_size=64)),
        ("int8:level_stride=4", Grid(bits=8, level_stride=4)),
        ("int8:level_stride=4,group_size=32", Grid(level_stride=4, group_size=32)),
        ("int6:clip=0.9995", Grid(bits=6, clip_quantile=0.9995)),
        ("int4:clip=search,group_size=64", Grid(bits=4, clip_quantile=None, group_size=64)),
        ("sigma:0.3", Grid(sigma=0.3)),
        ("sigma:1e-2", Grid(sigma=0.01)),
        ("sigma:sigma=0.3", Grid(sigma=0.3)),
        ("sigma:0.3,group_size=64", Grid(sigma=0.3, group_size=64)),
        ("sigma:0.3,per_tensor", Grid(sigma=0.3, per_tensor=True)),
        ("trellis:states=8,sigma=0.3,per_tensor", Trellis(8, 0.3, per_tensor=True)),
        ("trellis:8", Trellis(8)),
        ("sdclip", Grid(bits=6, clip_sigmas=12.85)),
        ("sdclip:bits=8,clip_sigmas=20", Grid(bits=8, clip_sigmas=20.0)),
        ("sdclip:clip_sigmas=10,group_size=128", Grid(bits=6, clip_sigmas=10.0, group_size=128)),
        ("gptq", Trellis(1, 12.85 / 31, rate=0.0, output=False)),
        ("gptq:bits=8,clip_sigmas=20", Trellis(1, 20 / 127, rate=0.0, output=False)),
        ("ternary", Ternary()),
        ("ternary:group_size=64", Ternary(64)),
        ("binary", Ternary(binary=True)),
        ("codebook", Codebook()),
        ("codebook:k=32", Codebook(32)),
        ("codebook:k=8,per_row,rate=0.01", Codebook(8, per_row=True, rate=0.01)),
        ("rotation:bits=3", Rotation(3)),
        ("rotation:bits=2,seed=7", Rotation(2, seed=7)),
        ("rotation:base=sigma:0.3", Rotation(base=Grid(sigma=0.3))),
        ("lowrank", LowRank()),
        ("lowrank:rank=2,base=int4:group_size=32", LowRank(2, Grid(bits=4, group_size=32))),
        (
            "lowrank:rank=8,left_bits=2,right_bits=4,base=codebook:k=8,per_row",
            LowRank(8, Codebook(8, per_row=True), 2, 4),
        ),
        ("spectral", Spectral()),
        ("spectral:auto", Spectral()),
        ("spectral:sigma=0.5", Spectral(sigma=0.5)),
        ("spectral:auto,sigma=0.5,scan=planes-morton", Spectral(sigma=0.5, scan="planes-morton")),
        ("spectral:dct,edge=16,sigma=0.2", Spectral(Transform("dct", 16), 0.2)),
        ("spectral:dct,axes=kernel", Spectral(Transform("dct", axes="kernel"))),
        ("spectral:wavelet97,levels=2", Spectral(Transform("wavelet97", levels=2))),
        ("spectral:identity,sigma=1", Spectral(Transform("identity"), 1.0)),
        ("tucker", Tucker()),
        ("tucker:energy=0.9", Tucker(0.9)),
        ("tucker:ranks=16x8x3x3", Tucker(ranks=(16, 8, 3, 3))),
        ("tucker:energy=0.9,base=trellis:states=8,sigma=0.2", Tucker(0.9, base=Trellis(8, 0.2))),
        ("tucker:base=spectral:dct,edge=4", Tucker(base=Spectral(Transform("dct", 4)))),
        ("tucker:base=ternary", Tucker(base=Ternary())),
    ],
)
def test_specs(text: str, scheme: Scheme) -> None:
    assert parse_spec(text) == scheme


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "did you mean"),
        ("in8", "'int8'"),
        ("losless", "'lossless'"),
        ("sdclp:clip_sigmas=3", "'sdclip"),
        ("gtpq", "'gptq"),
        ("rotate:bits=4", "'rotation:bits=4'"),
        ("spectrl:dct", "'spectral:auto"),
        ("tuker:energy=1", "'tucker:energy=0.99'"),
        ("int9", "9"),
        ("int8:level_stride=200", "level_stride=200"),
        ("int6:clip=most", "'most'"),
        ("int6:clip=2", "2.0"),
        ("int6:k=3", "'k=3'.*clip=….*level_stride=….*group_size=…"),
        ("int4:groups=3", "groups=3"),
        ("sigma:", "'sigma:0.3'"),
        ("sigma:1e", "'1e'"),
        ("sigma:0", "0.0"),
        ("sdclip:bits=9", "9"),
        ("sdclip:clip_sigmas=x", "'x'"),
        ("gptq:group_size=64", "'group_size=64'"),
        ("codebook:q=4", "'q=4'.*k=…, per_row, rate=…"),
        ("codebook:k", "'k'"),
        ("codebook:per_row=1", "'per_row=1'"),
        ("codebook:k=4,k=5", "'k=5'"),
        ("codebook:k=many", "'many'"),
        ("codebook:rate=x", "'x'"),
        ("ternary:group_size=0", "group_size=0"),
        ("lowrank:base=int9", "9"),
        ("lowrank:base=", "did you mean"),
        ("spectral:haar", "'haar'"),
        ("spectral:dct,edge=0", "edge=0"),
        ("spectral:dct,k=2", "edge=…"),
        ("spectral:dct,axes=rows", "'rows'"),
        ("spectral:dct,sigma=x", "'x'"),
        ("spectral:auto,scan=snake", "'snake'"),
        ("spectral:auto,edge=4", "edge"),
        ("tucker:energy=0", "energy=0.0"),
        ("tucker:energy=x", "'x'"),
        ("tucker:k=3", "ranks=…"),
        ("tucker:ranks=3xx", "'3xx'"),
        ("tucker:ranks=3x4,energy=0.9", "one of the two"),
        ("tucker:ranks=0x4", "ranks="),
    ],
)
def test_the_error_of_a_wrong_spec_quotes_it_or_offers_the_right_one(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_spec(text)


def test_every_word_has_an_example_that_is_a_spec() -> None:
    for text in registry.examples_of_words():
        word = registry.words()[text.partition(":")[0]]
        assert type(parse_spec(text)) is word.scheme


def test_all_specs_and_rules_of_the_docs_parse() -> None:
    text = DOCS.read_text(encoding="utf-8")
    measured = re.findall(r"^\| `([^`]+?)(?: \+ data)?` \| [\d.]+ \|", text, re.MULTILINE)
    rules = re.findall(r"--scheme '([^']+)'", text.replace("PATTERN=SPEC", "*=int8"))
    assert len(measured) > 10
    assert len(rules) > 5
    assert all(parse_spec(spec).quantizes for spec in measured)
    parsed = [parse_rules([tuple(rule.split("=", 1))])[1][0] for rule in rules if "=" in rule]
    assert len(parsed) > 5
    assert all(scheme.quantizes for _, scheme in parsed)


def test_the_table_for_the_docs_has_every_word_and_option() -> None:
    table = registry.markdown_table()
    for name, word in registry.words().items():
        if word.spec.listed:
            (row,) = [row for row in table.splitlines() if re.match(rf"\| `{name}[:`]", row)]
            assert all(option in row for option, _, _ in registry.options_of(word))


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[Scheme]]:
    """Return a function that makes schemes from outside birdie; what is registered is forgotten after the test."""
    monkeypatch.setattr(registry, "_foreign", {})
    registry.words.cache_clear()

    def make(name: str, *words: str, number: int = 200) -> type[Scheme]:
        @dataclass(frozen=True)
        class Foreign(Scheme):
            decoder: ClassVar[Decoder] = replace(grid.DECODER, name=name, number=number)
            specs: ClassVar[tuple[Spec, ...]] = tuple(Spec(word, "a scheme of a test") for word in words)

            bits: int = 4

            def encode(
                self,
                name: str,
                weight: Tensor,
                *,
                sensitivity: Sensitivity | None = None,
                lam: float = 0.0,  # noqa: ARG002 (birdie 0.1 had this parameter: packages may still declare it)
            ) -> Encoded:
                encoded = Grid(self.bits).encode(name, weight, sensitivity=sensitivity)
                return replace(encoded, scheme=self.decoder.name)

        return Foreign

    return make


@pytest.fixture(autouse=True)
def _forget_words() -> object:
    """The words are cached, and a test may have added some."""
    yield
    registry.words.cache_clear()


def test_a_registered_scheme_is_found_by_its_words_and_its_name(foreign: Callable[..., type[Scheme]]) -> None:
    scheme = registry.register(foreign("mine", "mine", "my_own"))
    assert registry.register(scheme) is scheme
    assert parse_spec("my_own:bits=3") == scheme(bits=3)  # type: ignore[call-arg]
    assert parse_spec("my_own:3") == scheme(bits=3)  # type: ignore[call-arg]
    assert registry.decoder("mine") is scheme.decoder
    assert registry.names()[-1] == "mine"
    weight = torch.randn(4, 5)
    assert torch.equal(registry.decode(scheme().encode("w", weight)), registry.decode(Grid(4).encode("w", weight)))


def test_names_and_words_are_taken_once(foreign: Callable[..., type[Scheme]]) -> None:
    registry.register(foreign("mine", "mine"))
    for scheme in (foreign("mine"), foreign("grid")):
        with pytest.raises(ConfigError, match=r"'(mine|grid)'"):
            registry.register(scheme)
    for word in ("mine", "int4"):
        with pytest.raises(ConfigError, match=word):
            registry.register(foreign("other", word, number=201))
    for wrong in (Scheme, Grid(), int):
        with pytest.raises(ConfigError, match="no scheme"):
            registry.register(wrong)  # type: ignore[arg-type]


def test_a_number_has_one_owner_and_those_below_64_are_of_birdie(foreign: Callable[..., type[Scheme]]) -> None:
    registry.register(foreign("mine", number=64))
    registry.register(foreign("last", number=65_535))
    with pytest.raises(ConfigError, match=r"'mine' and 'other'.*64"):
        registry.register(foreign("other", number=64))
    for number in (-1, 0, 5, 63, 65_536):
        with pytest.raises(ConfigError, match=rf"'other'.* {number}.*64 to 65,535"):
            registry.register(foreign("other", number=number))
    assert registry.names()[-2:] == ("mine", "last")


def test_the_numbers_of_the_files_are_those_of_the_decoders() -> None:
    decoders = [scheme.decoder for scheme in registry.builtin()]
    assert {decoder.number: decoder.name for decoder in decoders} == numbers()
    assert len({decoder.name for decoder in decoders}) == len(decoders)
    assert all(0 < number < 64 for number in numbers())


def test_the_decoder_of_an_unknown_scheme_is_not_imported_but_asked_for() -> None:
    with pytest.raises(ArtifactError, match=r"schemes=.'nobodys'"):
        registry.decoder("nobodys")
    with pytest.raises(ConfigError, match="'nobodys'"):
        registry.import_scheme("nobodys")


def test_a_scheme_of_an_installed_package_is_imported_when_its_word_is_written(
    foreign: Callable[..., type[Scheme]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = foreign("installed", "installed")
    point = EntryPoint("installed", "installed:Scheme", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: scheme)
    monkeypatch.setattr(
        registry, "entry_points", lambda **of: [point] * (of == {"group": registry.GROUP, "name": "installed"})
    )
    assert parse_spec("installed:bits=2") == scheme(bits=2)  # type: ignore[call-arg]
    assert registry.import_scheme("installed") is scheme
