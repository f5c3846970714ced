"""Lines to read: each pattern points at its line, in packed code as well, and none decides anything."""

import base64
import bz2
import lzma
import zlib
from collections.abc import Callable

import pytest

from birdie.golf.audit import rules
from birdie.golf.audit.scan import PATTERNS, scan

LINES = {
    "loss.backward()": rules.SCORE_FIRST,
    "grads = torch.autograd.grad(loss, params)": rules.SCORE_FIRST,
    "np.add.at(table, keys, 1)": rules.SCORE_FIRST,
    "counts[before, after] += 1": rules.SCORE_FIRST,
    "nats = np.minimum(first, second)": rules.ONE_PASS,
    "best = min(loss_of(a), loss_of(b))": rules.ONE_PASS,
    "key = (a * 36313 ^ b * 27191) % size": rules.NORMALIZED,
    "p = (1 - mix) * p + mix * q": rules.NORMALIZED,
    "p = torch.where(hint == targets, 0.9, p)": rules.NORMALIZED,
    "hook = layer.register_forward_hook(collect)": rules.VALIDATION,
    "if val_loss < best_loss: best_loss = val_loss": rules.VALIDATION,
    "t = minimize_scalar(lambda t: loss(held, t)).x": rules.VALIDATION,
    "sizes[i] = len(sp.id_to_piece(i).encode())": rules.BYTES,
    'limit = float(os.environ.get("MAX_WALLCLOCK_SECONDS", "900"))': rules.TRAIN_TIME,
    "if step == force_stop_step: break_now = True": rules.TRAIN_TIME,
    "urllib.request.urlretrieve(url, path)": rules.SELF_CONTAINED,
    'os.system("pip install brotli")': rules.SELF_CONTAINED,
    'files = glob.glob("data/fineweb_train_*.bin")': rules.SELF_CONTAINED,
    "exec(text)": rules.SELF_CONTAINED,
}

PLAIN = """\
# loss.backward() in a comment
model.eval()
logits = torch.compile(model)(x)
loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
max_wallclock_seconds = 600.0
val_files = "fineweb_val_*.bin"
total += loss.item() * y.numel()
print(f"val_bpb:{total / math.log(2) / n_bytes:.4f} step_avg:{1000.0 * seconds / step:.2f}ms")
"""


@pytest.mark.parametrize("line", LINES)
def test_each_line_is_pointed_at_for_its_rule(line: str) -> None:
    findings = scan(f"{PLAIN}if x:\n    {line}\n".encode(), "x.py")
    assert {finding.rule for finding in findings} == {LINES[line]}, findings
    assert {(finding.result, finding.check, finding.path, finding.line) for finding in findings} == {
        ("warning", "scan", "x.py", PLAIN.count("\n") + 2)
    }


def test_every_pattern_has_a_line_and_a_plain_program_none() -> None:
    for pattern in PATTERNS[:-1]:  # the last one is of lines too long for this table
        assert any(pattern.text.search(line) and pattern.rule == rule for line, rule in LINES.items()), pattern
    assert scan(PLAIN.encode(), "x.py") == ()


def test_a_pattern_is_one_finding_with_the_lines_that_match() -> None:
    (finding,) = scan(b"loss.backward()\n" * 9, "x.py")
    assert (finding.line, "also lines 2, 3, 4, 5, 6, 7, and 2 more" in finding.evidence) == (1, True)


def test_a_track_without_a_cap_has_no_clock() -> None:
    line = b"MAX_WALLCLOCK_SECONDS = 14400\n"
    assert [finding.rule for finding in scan(line, "x.py")] == [rules.TRAIN_TIME]
    assert scan(line, "x.py", unlimited=True) == ()


INNER = "import torch\n\n\ndef step(loss):\n    loss.backward()\n" + "".join(f"x = {n**9}\n" for n in range(99))


@pytest.mark.parametrize("compress", [lzma.compress, zlib.compress, bz2.compress])
@pytest.mark.parametrize("encode", [base64.b85encode, base64.b64encode, base64.a85encode])
def test_packed_scripts_are_unpacked(compress: Callable[[bytes], bytes], encode: Callable[[bytes], bytes]) -> None:
    packed = encode(compress(INNER.encode()))
    (finding,) = scan(b"import lzma as L, base64 as B\nexec(L.decompress(B.decode(%r)))\n" % packed, "x.py")
    assert (finding.rule, finding.line) == (rules.SCORE_FIRST, 5)
    assert "in the source that it unpacks: " in finding.evidence


def test_code_that_is_not_unpacked_is_pointed_at() -> None:
    findings = scan(b"exec(decrypt('%s'))\n" % (b"Zm9v" * 5000), "x.py")
    assert [(finding.rule, finding.line) for finding in findings] == [(rules.SELF_CONTAINED, 1)]
    assert "not searched" in findings[0].evidence


@pytest.mark.parametrize("source", [b"def (", b"\x00", b"x = '\xff'", b"(" * 5000, b"-" * 200_000 + b"1"])
def test_what_is_not_python_is_unknown(source: bytes) -> None:
    assert "unknown" in {finding.result for finding in scan(source, "x.py")}


def test_the_names_of_variables_do_not_matter() -> None:
    for line in (b"a.backward()\n", b"validation_loss.backward()\n"):
        assert {finding.rule for finding in scan(line, "x.py")} == {rules.SCORE_FIRST}
