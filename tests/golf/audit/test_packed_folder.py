"""A folder with a packed script: its modules are read, its bytes are the file's, and logs begin with its modules."""

from pathlib import Path

from birdie.golf.audit.claims import check_script_of_logs
from birdie.golf.audit.scan import scan
from birdie.golf.audit.shipped import shipped_folder
from birdie.lab.logs import parse_log
from tests.golf.test_packed import script_of

ADAPTS = """import torch, numpy
tokens = numpy.fromfile("fineweb_val_000000.bin")
loss = model(tokens)
loss.backward()
"""
HELPER = 'source = open("kernel.cu").read()\n'
RUN = "====\nRunning Python 3.11\nseed:7\nfinal_birdie_roundtrip_exact val_loss:2.0 val_bpb:1.2\n"


def folder(root: Path) -> Path:
    (root / "train_gpt.py").write_bytes(script_of(["pass", "a.py", ADAPTS, "b.py", HELPER]))
    (root / "kernel.cu").write_text("int x;")
    return root


def test_modules_are_scanned_and_the_file_is_counted(tmp_path: Path) -> None:
    ships = shipped_folder(folder(tmp_path))
    assert [path.name for path in ships.code] == ["kernel.cu", "train_gpt.py"]
    assert ships.code_bytes == sum((tmp_path / name).stat().st_size for name in ("train_gpt.py", "kernel.cu"))
    module = tmp_path / "train_gpt.py" / "a.py"
    findings = scan(ships.sources[module], str(module))
    assert "score-first" in {finding.rule.name for finding in findings}


def test_a_log_begins_with_the_modules_of_the_script(tmp_path: Path) -> None:
    ships = shipped_folder(folder(tmp_path))
    assert ships.script is not None
    source = ships.sources[ships.script]
    same = parse_log(f"# a.py\n{ADAPTS}\n# b.py\n{HELPER}\n{RUN}", "same.log")
    other = parse_log(f"# a.py\n{ADAPTS.replace('loss', 'nats')}\n{RUN}", "other.log")
    findings = list(check_script_of_logs(source, "train_gpt.py", [same, other]))
    assert [(finding.path, finding.result) for finding in findings] == [("other.log", "warning")]
