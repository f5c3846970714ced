"""The scan points at illegal scripts by line, whatever their variables are called, and fails nobody."""

import ast
import base64
import lzma
from pathlib import Path

import pytest

from birdie.golf.audit.deadline import Deadline, OutOfTimeError
from birdie.golf.audit.rules import BYTES, RULES, SCORE_FIRST, TRAIN_TIME, VALIDATION, Finding
from birdie.golf.audit.scan import SCANNED, scan
from tests.golf.audit.scripts import ILLEGAL, LEGAL, SNIPPETS, START, Script, Snippet

ROOT = Path(__file__).resolve().parents[3]

PROBES_ALONE = {"logit_bias", "looks_ahead", "no_normaliser"}
"""Illegal scripts that have no line to point at: their probes fail. docs/audit.md lists them."""
OUT_OF_REACH = {"names, training data after the model was read back: self-contained"}
"""Illegal snippets that nothing points at. docs/audit.md lists them."""
LEGAL_WITH_WARNINGS = {
    *("chunked_sgd", "counting", "document_lora", "hashed_over_vocabulary", "ngram_tilt", "previous_chunk"),
    *("switched_off", "work_queue"),
}
"""Legal scripts that learn, count or compare while they score: lines worth reading."""


def warnings(source: str | bytes) -> dict[str, list[int]]:
    """Return lines by rule."""
    lines: dict[str, list[int]] = {}
    for finding in scan(source.encode() if isinstance(source, str) else source, "x.py"):
        assert (finding.result, finding.check, finding.path) == ("warning", "scan", "x.py"), finding
        lines.setdefault(finding.rule.name, []).append(finding.line)
    return lines


@pytest.mark.parametrize("script", ILLEGAL, ids=str)
def test_every_illegal_script_is_pointed_at_or_probed(script: Script) -> None:
    lines = warnings(script.path.read_bytes())
    rules = {rule for _, rule in script.broken}
    assert rules & lines.keys() or script.probed
    assert (not lines) == (script.path.stem in PROBES_ALONE)


def test_pointers_are_at_the_line_or_near_it() -> None:
    broken = [(script, line, rule) for script in ILLEGAL for line, rule in script.broken]
    near = [
        script
        for script, line, rule in broken
        if any(abs(line - pointer) <= 3 for pointer in warnings(script.path.read_bytes()).get(rule, []))
    ]
    assert (len(near), len(broken)) == (20, 25)


@pytest.mark.parametrize("script", LEGAL, ids=str)
def test_no_legal_script_is_accused_and_few_get_warnings(script: Script) -> None:
    assert bool(warnings(script.path.read_bytes())) == (script.path.stem in LEGAL_WITH_WARNINGS)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_every_illegal_snippet_is_pointed_at(snippet: Snippet) -> None:
    lines = warnings(snippet.source)
    if snippet.broken:
        assert (snippet.broken in lines) == (str(snippet) not in OUT_OF_REACH)


def test_the_documentation_lists_what_is_out_of_reach() -> None:
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    for name in PROBES_ALONE | {title.split(", ")[1].partition(":")[0] for title in OUT_OF_REACH}:
        assert name in text, name


class Renaming(ast.NodeTransformer):
    """Gives a script's own variables, parameters and functions other names; settings in capitals keep theirs."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - {"score", "scorer"}
        bound -= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        bound -= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        self.names = {name: f"v{number}" for number, name in enumerate(sorted(bound - {"self"})) if not name.isupper()}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "arg", "name"):
            if not isinstance(node, ast.keyword) and isinstance(getattr(node, field, None), str):
                setattr(node, field, self.names.get(getattr(node, field), getattr(node, field)))
        return super().generic_visit(node)


@pytest.mark.parametrize("script", [*ILLEGAL, *LEGAL], ids=str)
def test_renaming_variables_changes_no_pointer(script: Script) -> None:
    tree = ast.parse(script.path.read_text())
    source = ast.unparse(tree)
    other = ast.unparse(Renaming(tree).visit(tree))
    assert other != source
    assert warnings(other) == warnings(source)


def test_nothing_found_is_no_finding() -> None:
    assert scan(b"x = 1\n", "x.py") == ()
    assert set(SCANNED) < set(RULES)


def test_packed_scripts_are_unpacked() -> None:
    inner = next(script for script in ILLEGAL if script.path.stem == "slot")
    packed = base64.b85encode(lzma.compress(inner.path.read_bytes())).decode()
    (finding,) = scan(f"import lzma as L,base64 as B\nexec(L.decompress(B.b85decode('{packed}')))\n".encode(), "x.py")
    assert (finding.rule, finding.line) == (SCORE_FIRST, inner.broken[0][0] - 1)
    assert "unpacks" in finding.evidence


@pytest.mark.parametrize("source", [b"def (", b"\x00", b"x = '\xff'", b"(" * 5000, b"-" * 200_000 + b"1"])
def test_what_is_not_python_is_unknown(source: bytes) -> None:
    assert [finding.result for finding in scan(source, "x.py")] == ["unknown"]


DEEP = {
    "sum": "x = a" + "+a" * 400,
    "calls": "x = a" + ".b()" * 400,
    "test": "if is_byte(a" + "+a" * 500 + "): x = 1",
    "length": "def f(piece):\n    x = len((piece" + "+a" * 500 + ").encode())",
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_deep_expressions_are_survived(source: str) -> None:
    assert "fail" not in {finding.result for finding in scan(f"sp.id_to_piece(1)\n{source}\n".encode(), "x.py")}


def test_the_scan_keeps_its_time_limit() -> None:
    with pytest.raises(OutOfTimeError):
        scan(b"x = 1\n", "x.py", deadline=Deadline(0.0))


def test_a_track_without_a_cap_has_no_clock() -> None:
    assert scan(b"MAX_WALLCLOCK_SECONDS = 14400\n", "x.py", unlimited=True) == ()
    assert warnings("MAX_WALLCLOCK_SECONDS = 14400\n") == {TRAIN_TIME.name: [1]}
    assert warnings("MAX_WALLCLOCK_SECONDS = 600\nEVAL_WALLCLOCK_SECONDS = 900\n") == {}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("1 if sp.is_byte(i) else len(sp.id_to_piece(i).replace('▁', ' ').encode())", False),
        ("3 if sp.is_byte(i) else len(sp.id_to_piece(i).replace('▁', ' ').encode())", True),
        ("1 if sp.is_byte(i) else len(sp.id_to_piece(i).encode())", True),
        ("len(sp.id_to_piece(i).replace('▁', ' ').encode())", True),
    ],
)
def test_byte_counts_in_one_line(body: str, wrong: bool) -> None:
    lines = warnings(f"def sizes(sp):\n    return [{body} for i in range(sp.vocab_size())]\n")
    assert lines == ({BYTES.name: [2]} if wrong else {})


CHOICES = (
    "min((0.9, 1.0, 1.1), key=lambda t: at(DATA, t))",
    "min((at(DATA, t), t) for t in (0.9, 1.0))[1]",
    "sorted([(at(DATA, t), t) for t in (0.9, 1.0)])[0][1]",
    "minimize_scalar(lambda t: at(DATA, t), bounds=(0.8, 1.2)).x",
)


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_are_pointed_at_only_on_validation(choice: str) -> None:
    source = START + (
        "def at(data, t):\n    return F.cross_entropy(net(data[:-1]) / t, data[1:]).item()\n"
        f"best = {choice}\nprint('val_bpb', at(held, best) / math.log(2))\n"
    )
    assert warnings(source.replace("DATA", "held")).keys() == {VALIDATION.name}
    assert warnings(source.replace("DATA", "seen")) == {}


def test_training_is_no_learning_from_validation() -> None:
    """A training loop and an evaluation in the style of the challenge's baseline."""
    source = """
import glob, math, os
import torch
import torch.nn.functional as F
class Hyperparameters:
    data_path = os.environ.get("DATA_PATH", "./data")
    train_files = os.path.join(data_path, "fineweb_train_*.bin")
    val_files = os.path.join(data_path, "fineweb_val_*.bin")
def load_tokens(pattern):
    return torch.cat([torch.load(path) for path in sorted(glob.glob(pattern))])
class Loader:
    def __init__(self, pattern):
        self.tokens = load_tokens(pattern)
    def next_batch(self, size):
        return self.tokens[:size], self.tokens[1 : size + 1]
def eval_val(model, val_tokens):
    total = torch.zeros(())
    for begin in range(0, len(val_tokens) - 64, 64):
        piece = val_tokens[begin : begin + 65]
        total += F.cross_entropy(model(piece[:-1]), piece[1:]).detach()
    return total / math.log(2)
def main():
    args, model = Hyperparameters(), torch.nn.Embedding(16, 16)
    loader, val_tokens = Loader(args.train_files), load_tokens(args.val_files)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(100):
        if step % 10 == 0:
            print(f"step:{step} val_bpb:{eval_val(model, val_tokens):.4f}")
        x, y = loader.next_batch(64)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
main()
"""
    assert warnings(source) == {}
    tuned = source.replace("x, y = loader.next_batch(64)", "x, y = val_tokens[:-1], val_tokens[1:]")
    assert warnings(tuned).keys() == {SCORE_FIRST.name, VALIDATION.name}


@pytest.mark.slow
def test_birdies_own_scripts_get_no_finding_but_warnings() -> None:
    paths = [*(ROOT / "birdie" / "score").rglob("*.py"), *(ROOT / "birdie" / "train").rglob("*.py")]
    findings: list[Finding] = [finding for path in paths for finding in scan(path.read_bytes(), str(path))]
    assert len(paths) > 25
    assert {finding.result for finding in findings} <= {"warning"}
    assert len({finding.path for finding in findings}) < len(paths) / 4
