"""Specs of the siblings of the grid: each spelling, what a typo is told, and a file of each that loads."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import birdie
from birdie.cli import compress
from birdie.compress.rate.assignment import QUANTIZERS, SMALL, assign, parse_rule, parse_spec, suit
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.rotation import Rotation
from birdie.compress.schemes.ternary import Ternary
from birdie.compress.schemes.trellis import Trellis
from birdie.errors import ConfigError
from tests.compress.matrices import random_weight

SPECS = [
    ("int4:group_size=64", Grid(bits=4, group_size=64)),
    ("int8:level_stride=4,group_size=32", Grid(level_stride=4, group_size=32)),
    ("int6:clip=0.9995", Grid(bits=6, clip_quantile=0.9995)),
    ("int4:clip=search,group_size=64", Grid(bits=4, clip_quantile=None, group_size=64)),
    ("sigma:0.3,group_size=64", Grid(sigma=0.3, group_size=64)),
    ("sigma:0.3,per_tensor", Grid(sigma=0.3, per_tensor=True)),
    ("trellis:states=8,sigma=0.3,per_tensor", Trellis(8, 0.3, per_tensor=True)),
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
    ("rotation:bits=2,residual,seed=7", Rotation(2, residual=True, seed=7)),
    ("rotation:base=sigma:0.3", Rotation(base=Grid(sigma=0.3))),
    ("lowrank", LowRank()),
    ("lowrank:rank=2,base=int4:group_size=32", LowRank(2, Grid(bits=4, group_size=32))),
    ("lowrank:rank=8,left_bits=2,right_bits=4,base=codebook:k=8,per_row", LowRank(8, Codebook(8, per_row=True), 2, 4)),
]


@pytest.mark.parametrize(("text", "scheme"), SPECS)
def test_specs(text: str, scheme: Scheme) -> None:
    assert parse_spec(text) == scheme


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("codebook:q=4", "option 'q=4'.*k=…, rows, rate=…"),
        ("codebook:k", "option 'k'"),
        ("codebook:rows=1", "option 'rows=1'"),
        ("codebook:k=4,k=5", "there twice"),
        ("codebook:k=many", "'many' is not a whole number"),
        ("codebook:rate=x", "'x' is not a number of variances"),
        ("ternary:group_size=0", "group=0"),
        ("int6:clip=most", "'most' is not a quantile"),
        ("int6:clip=2", "2.0 is out of range"),
        ("int6:k=3", "option 'k=3'.*step=…, group=…, clip=…"),
        ("sdclip:bits=9", "9"),
        ("sdclip:clip_sigmas=x", "'x' is not a number of standard deviations"),
        ("gptq:group=64", "option 'group=64'"),
        ("sdclp:k=3", "did you mean 'sdclip"),
        ("gtpq", "did you mean 'gptq"),
        ("int4:groups=3", "groups=3"),
        ("lowrank:base=int9", "9"),
        ("lowrank:base=", "did you mean"),
        ("rotate:bits=4", "did you mean 'rotation:bits=4'"),
        ("sigma:", "did you mean"),
    ],
)
def test_wrong_specs_say_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_spec(text)


def test_all_specs_and_rules_of_the_docs_are_ones() -> None:
    text = (Path(__file__).parents[3] / "docs" / "schemes.md").read_text(encoding="utf-8")
    measured = re.findall(r"^\| `([^`]+?)(?: \+ data)?` \| [\d,]+ \|", text, re.MULTILINE)
    rules = re.findall(r"--scheme '([^']+)'", text.replace("PATTERN=SPEC", "*=int8"))
    assert len(measured) > 20
    assert len(rules) > 5
    for spec in measured:
        assert parse_spec(spec).quantizes, spec
    for rule in rules:
        assert parse_rule(rule)[1].quantizes, rule


def kind(spec: str) -> str:
    """What stands before the options; one for all widths."""
    return re.sub(r"^int\d", "int", spec.partition(":")[0])


def test_the_docs_list_every_scheme_and_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "schemes.md").read_text(encoding="utf-8")
    table = text.partition("| spec | is | options |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    heads = set()
    for first, _, options in rows:
        listed = re.findall(r"`(\w+)(?:=[^`]*)?`", options)
        for spec in re.findall(r"`([^`]+)`", first):
            head = spec.replace("C", "0.3").replace("KIND", "dct")
            heads.add(kind(head))
            assert parse_spec(head).quantizes, spec
            with pytest.raises(ConfigError, match="choose from") as said:
                parse_spec(f"{head}{',' if ':' in head else ':'}oops=1")
            offered = re.findall(r"\w+", str(said.value).partition("choose from")[2])
            assert set(offered) <= set(listed), spec
    with pytest.raises(ConfigError, match="one of") as unknown:
        parse_spec("none")
    forms = str(unknown.value).partition("one of ")[2].rstrip(")").split(", ")
    assert {kind(form) for form in forms} == heads | {"lossless", "fp16", "bf16"}


def test_the_help_of_compress_names_specs() -> None:
    (parameter,) = get_type_hints(compress.compress, include_extras=True)["scheme"].__metadata__
    named = re.search(r"SPEC: (.+?) and more \(docs/schemes\.md\)", parameter.help)
    assert named is not None
    specs = named[1].replace("…", ", ").split(", ")
    assert {"sdclip:clip_sigmas=12.85", "gptq:clip_sigmas=12.85"} < set(specs)
    for spec in specs:
        parse_spec(spec)


@pytest.mark.parametrize(("text", "scheme"), SPECS)
def test_quantizers_leave_what_is_small_to_sixteen_bits(text: str, scheme: Scheme) -> None:
    assert scheme.quantizes, text
    assert applicable(scheme, torch.randn(SMALL)) == scheme
    assert applicable(scheme, torch.ones(SMALL - 1)) == Cast()
    assert applicable(scheme, torch.arange(SMALL)) == Lossless()
    assert assign({"norm": torch.ones(2, 3)}, {}, scheme) == {"norm": Cast()}


def test_a_file_of_each_loads_and_says_what_it_holds(tmp_path: Path) -> None:
    state = {f"{index:02} {text}": random_weight(24, 32, seed=index) for index, (text, _) in enumerate(SPECS)}
    path = tmp_path / "m.birdie"
    rules = [(f"{index:02} *", scheme) for index, (_, scheme) in enumerate(SPECS)]
    summary = birdie.save(state, path, scheme=rules, coder="fast")
    loaded = birdie.load(path)
    for row, (_, scheme) in zip(summary.tensors, SPECS, strict=True):
        assert row.scheme == type(scheme).__name__.lower()
        weight = state[row.name]
        error = float((loaded[row.name] - weight).square().sum() / weight.square().sum())
        assert error < 0.5, row.name
