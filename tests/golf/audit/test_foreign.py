"""Foreign scripts, run in the sandbox: what they do is a finding, what they forge is not believed."""

import os
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit.foreign import run_script
from birdie.golf.audit.rules import Finding, combined
from birdie.golf.audit.sandbox import RefusedError, Sandbox
from tests.golf.audit.scripts import ILLEGAL, LEGAL, Script

needs_sandbox = pytest.mark.usefixtures("way")

HONEST = "import math\nVOCABULARY = 4\ndef score(tokens):\n    return [math.log(4.0)] * (len(tokens) - 1)\n"


def script(folder: Path, text: str) -> Path:
    path = folder / "train_gpt.py"
    path.write_text(text)
    return path


def results(findings: tuple[Finding, ...]) -> dict[str, str]:
    rules = {finding.rule for finding in findings}
    return {rule.name: combined(finding.result for finding in findings if finding.rule == rule) for rule in rules}


@needs_sandbox
def test_an_honest_script_passes(tmp_path: Path) -> None:
    findings = run_script(script(tmp_path, HONEST))
    passed = ("runs", "one-pass", "causal", "normalised", "self-contained", "size")
    assert results(findings) == dict.fromkeys(passed, "pass")
    assert {finding.path for finding in findings} == {str(tmp_path / "train_gpt.py")}


@needs_sandbox
def test_files_that_it_reads_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").write_bytes(b"x" * 5000)
    path = script(tmp_path, "open(__file__.replace('train_gpt.py', 'model.bin'), 'rb').read()\n" + HONEST)
    (size,) = [finding for finding in run_script(path) if finding.rule.name == "size"]
    assert f"{5000 + path.stat().st_size:,}" in size.evidence
    assert size.result == "pass"
    monkeypatch.setattr("birdie.golf.audit.rules.CAP_BYTES", 5000)
    assert results(run_script(path))["size"] == "fail"


@needs_sandbox
def test_data_in_targets_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script reads them unseen: no file is opened."""
    code = "import os\nhere = os.path.dirname(__file__)\ndata = [os.readlink(f'{here}/{i}') for i in range(5)]\n"
    path = script(tmp_path, code + HONEST)
    for number in range(5):
        (tmp_path / str(number)).symlink_to("x" * 4000)
    (size,) = [finding for finding in run_script(path) if finding.rule.name == "size"]
    names = len("train_gpt.py") + 4 + 5 * 4001
    assert (size.result, f"{names + path.stat().st_size:,} of" in size.evidence) == ("pass", True)
    monkeypatch.setattr("birdie.golf.audit.rules.CAP_BYTES", 20_000)
    assert results(run_script(path))["size"] == "fail"


@needs_sandbox
def test_opening_training_data_fails(tmp_path: Path) -> None:
    shard = tmp_path / "fineweb_train_000000.bin"
    shard.write_bytes(b"x" * 10)
    code = (
        f"def score(tokens):\n    open('/submission/{shard.name}', 'rb').read()\n    return [1.0] * (len(tokens) - 1)\n"
    )
    assert results(run_script(script(tmp_path, code + "VOCABULARY = 4\n")))["self-contained"] == "fail"


@needs_sandbox
def test_a_script_cannot_hide_what_it_opens(tmp_path: Path) -> None:
    """It empties all that it finds in memory; the kernel's reports are elsewhere."""
    (tmp_path / "fineweb_train_000000.bin").write_bytes(b"x" * 10)
    code = """
import gc, math, os
VOCABULARY = 4
def score(tokens):
    open(os.path.dirname(__file__) + "/fineweb_train_000000.bin", "rb").read()
    for thing in gc.get_objects():
        for name in ("opened", "network"):
            values = getattr(thing, "__dict__", {}).get(name)
            if isinstance(values, (dict, list, set)):
                values.clear()
    return [math.log(4.0)] * (len(tokens) - 1)
"""
    result_of = results(run_script(script(tmp_path, code)))
    assert (result_of["self-contained"], result_of["causal"]) == ("fail", "pass")


@needs_sandbox
def test_what_the_process_claims_is_not_believed(tmp_path: Path) -> None:
    """Its GPT predicts the next token from that token, and the process is changed to deny it."""
    code = """
import sys, torch
host = sys.modules["__main__"].Host
build = host.model
host.model = lambda self, length: build(self, length) | {"leak": 0.0, "finite": True, "shape": [1, length, 8]}
class Hyperparameters:
    vocab_size = 8
class GPT(torch.nn.Module):
    def forward_logits(self, ids):
        return torch.nn.functional.one_hot(torch.roll(ids, -1, 1), 8)
"""
    assert results(run_script(script(tmp_path, code)))["causal"] == "fail"


@needs_sandbox
def test_limits_end_the_run_with_a_reason(tmp_path: Path) -> None:
    code = HONEST.replace(
        "    return", "    import os, time\n    while os.fork(): pass\n    time.sleep(60)\n    return"
    )
    findings = run_script(script(tmp_path, code))
    assert "512 processes" in findings[-1].evidence
    assert "fail" not in {finding.result for finding in findings}


@needs_sandbox
def test_the_report_names_the_sandbox_and_its_bounds(tmp_path: Path, way: str) -> None:
    (note,) = [finding for finding in run_script(script(tmp_path, HONEST)) if "sandbox" in finding.evidence]
    assert (note.rule.name, note.result) == ("runs", "unknown")
    assert f"({way}, " in note.evidence


def test_a_script_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train_gpt.py")
    with pytest.raises(DataError, match="named pipe"):
        run_script(tmp_path / "train_gpt.py")


@needs_sandbox
def test_a_slow_script_is_unknown(tmp_path: Path) -> None:
    slow = "import time\n" + HONEST.replace("    return", "    time.sleep(9)\n    return")
    findings = run_script(script(tmp_path, slow), seconds=1)
    assert "fail" not in {finding.result for finding in findings}
    assert "1 s" in findings[-1].evidence


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("import a_module_nobody_has\n", "unknown"),
        ("1 / 0\n", "fail"),
        ("x = 1\n", "unknown"),
        ("(", "fail"),
        ("import sys\n\nsys.exit(1)\n", "unknown"),
    ],
)
def test_scripts_that_do_not_run(tmp_path: Path, text: str, result: str) -> None:
    assert results(run_script(script(tmp_path, text)))["runs"] == result


@needs_sandbox
def test_losses_that_are_not_finite_fail(tmp_path: Path) -> None:
    assert results(run_script(script(tmp_path, HONEST.replace("math.log(4.0)", "math.nan"))))["one-pass"] == "fail"


@needs_sandbox
@pytest.mark.parametrize(
    "value", ["[]", "1", "{}", '{"seconds": []}', '{"opened": [["a", 1e999]], "network": []}', "1" + "0" * 400]
)
def test_forged_answers_are_not_believed(tmp_path: Path, value: str) -> None:
    """An answer that is forged before the script has loaded answers every question."""
    line = f'{{"value": {value}}}\n'.encode()
    code = f"import os\nfor fd in range(3, 1024):\n    try:\n        os.write(fd, {line!r} * 9)\n"
    findings = run_script(script(tmp_path, code + "    except OSError:\n        pass\n" + HONEST))
    assert any("interfered" in finding.evidence for finding in findings)
    assert "pass" not in {finding.result for finding in findings}


@needs_sandbox
@pytest.mark.parametrize("vocabulary", ["2**80", "[]", "1"])
def test_a_vocabulary_out_of_range_is_not_probed(tmp_path: Path, vocabulary: str) -> None:
    findings = run_script(script(tmp_path, HONEST.replace("VOCABULARY = 4", f"VOCABULARY = {vocabulary}")))
    assert any(finding.result == "unknown" and "4,194,304" in finding.evidence for finding in findings)
    assert [finding.rule.name for finding in findings if finding.result == "pass"] == ["runs"]  # nothing was scored
    assert "fail" not in {finding.result for finding in findings}


@needs_sandbox
def test_a_model_without_a_vocabulary_is_not_probed(tmp_path: Path) -> None:
    code = "import torch\nclass Hyperparameters:\n    vocab_size = 1\nclass GPT(torch.nn.Module):\n"
    code += "    def forward_logits(self, ids):\n        return torch.zeros(1, ids.shape[1], 1)\n"
    assert "pass" not in results(run_script(script(tmp_path, code))).values()


@needs_sandbox
@pytest.mark.slow
def test_a_model_is_built_small() -> None:
    windows = next(script for script in LEGAL if script.path.stem == "windows")
    findings = run_script(windows.path)
    assert results(findings)["runs"] == "pass"
    assert any("(1, 64, 16), finite" in finding.evidence for finding in findings)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in ILLEGAL if script.callable and script.probed], ids=str)
def test_illegal_scripts_are_caught(script: Script) -> None:
    failed = {rule for rule, result in results(run_script(script.path)).items() if result == "fail"}
    assert failed >= set(script.probed)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in LEGAL if script.callable], ids=str)
def test_legal_scripts_pass(script: Script) -> None:
    assert set(results(run_script(script.path)).values()) == {"pass"}


def test_without_a_sandbox_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_box: Sandbox) -> Sandbox:
        raise RefusedError("no namespace can be created")

    monkeypatch.setattr(Sandbox, "__enter__", refuse)
    marker = tmp_path / "ran"
    findings = run_script(script(tmp_path, f"open({str(marker)!r}, 'w')\n"))
    assert [(finding.rule.name, finding.result) for finding in findings] == [("runs", "unknown")]
    assert not marker.exists()
