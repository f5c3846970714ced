"""`birdie audit` as a user meets it: what is found in an artifact, a folder and a script, JSON, exit codes."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birdie.artifact.files
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.data.shards import ShardWriter, read_shard, write_shard
from birdie.data.tokenizer import ByteTokenizer, Tokenizer, train_caseops, train_sentencepiece
from birdie.errors import ConfigError, DataError
from birdie.golf.audit import ways
from birdie.golf.audit.audit import audit
from birdie.golf.audit.rules import (
    BYTES,
    CAUSAL,
    OVERLAP,
    RULES,
    RUNS,
    SCORE_FIRST,
    SEEDS,
    SIZE,
    TRAIN_TIME,
    VALIDATION,
    Verdict,
)
from birdie.golf.audit.ways import SteppedWindows
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.history import Entry, record
from birdie.run.recipe import DataSettings, Recipe
from birdie.score.ledger import Ledger
from birdie.score.mode import TrainingReport
from birdie.score.ngram import NgramSettings
from birdie.score.reference import WindowScorer
from birdie.score.settings import EvaluationSettings
from birdie.score.streaming import StreamingMode
from birdie.score.ttt import sgd
from birdie.score.ttt.lora import LoRAMode
from birdie.score.ttt.sgd import SGDTrainer
from birdie.score.windows import score_windows
from birdie.train.settings import TrainSettings
from tests.golf.audit.audited_logs import baseline, later

Ask = Callable[..., tuple[int, dict, str]]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """`ask("audit", path)` → (exit code, the JSON object, stderr)."""

    def call(*tokens: object) -> tuple[int, dict, str]:
        code = run(build_app, [*map(str, tokens), "--json"])
        out, err = capsys.readouterr()
        (line,) = out.splitlines()
        return code, json.loads(line), err

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of this project's words, by bytes: 40 documents to train on, 4 to validate on."""
    folder = tmp_path_factory.mktemp("shards")
    texts = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[:44]
    tokenizer = ByteTokenizer()
    for split, part in (("train", texts[:40]), ("val", texts[40:])):
        with ShardWriter(folder, split) as shards:
            for text in part:
                shards.write(np.insert(tokenizer.encode(text), 0, tokenizer.bos_id))
    return folder


def artifact_of(
    path: Path,
    text: DataSettings,
    made_with: Tokenizer | None = None,
    **evaluation: Any,
) -> Path:
    """A .birdie file as `birdie train` leaves it, of a model that was never trained."""
    torch.manual_seed(0)
    made_with = made_with or ByteTokenizer()
    recipe = Recipe(
        data=text,
        model=GPTConfig(vocab_size=made_with.vocab_size, num_layers=1, model_dim=16, num_heads=1, num_kv_heads=1),
        train=TrainSettings(train_seq_len=24, train_batch_tokens=24, accumulation=1),
        evaluation=EvaluationSettings(**{"ttt_lora": LoRAMode(chunk=8, rank=4, lr=0.01), **evaluation}),
    )
    tokenizer = {"kind": made_with.kind, "vocab_size": made_with.vocab_size, "sha256": made_with.digest}
    about = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": tokenizer, "steps": 1}
    birdie.artifact.files.save(GPT(recipe.model), path, coder="fast", metadata=about)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run folder with an artifact."""
    folder = tmp_path_factory.mktemp("run")
    artifact_of(folder / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"))
    record(folder, Entry(10, 1234.5, 3.0))
    return folder


def submission(folder: Path, **changes: object) -> Path:
    """A folder of three seeds without fault."""
    folder.mkdir(exist_ok=True)
    bpbs = []
    for seed, loss in ((1337, 2.0727), (42, 2.0731), (7, 2.0725)):
        text = baseline(seed=seed, loss=loss, code=137)
        (folder / f"train_seed{seed}.log").write_text(text)
        bpbs.append(float(text.rsplit("val_bpb:", 1)[1]))
    mean = sum(bpbs) / 3
    said = {"val_bpb": mean, "bytes_total": 15_815_984, "seeds": [1337, 42, 7], **changes}
    (folder / "submission.json").write_text(json.dumps(said))
    (folder / "README.md").write_text(f"# A model\n\nmean val_bpb {mean:.4f}\n")
    script = baseline().split("====", 1)[0].split("\n", 1)[1]
    (folder / "train_gpt.py").write_text(script)
    return folder


def test_an_artifact_of_ours_passes(ask: Ask, trained: Path) -> None:
    code, answer, _ = ask("audit", trained / "model.birdie", "--tokens", 60)
    assert code == 0, answer
    assert answer.keys() == {"path", "kind", "verdicts", "findings"}
    assert answer["kind"] == "artifact"
    assert list(answer["verdicts"]) == [rule.name for rule in RULES]
    assert "fail" not in answer["verdicts"].values()
    passed = {name for name, verdict in answer["verdicts"].items() if verdict == "pass"}
    assert {"causal", "score-first", "one-pass", "no-overlap", "byte-count", "size", "runs"} <= passed
    for finding in answer["findings"]:
        assert finding.keys() == {"rule", "verdict", "evidence", "by", "path", "line"}
    for verdict in answer["verdicts"].values():
        assert verdict in ("pass", "fail", "unknown")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ({"stride": 8}, "windows of 24, stride 8"),
        ({"documents": True, "stride": 5}, "windows of 24 in each document, stride 5"),
        ({"mode": "streaming", "streaming": StreamingMode(7, 2, segments=3)}, "streaming, context 24 and 2 sinks"),
        ({"mode": "streaming", "streaming": StreamingMode(exact=True)}, "exact streaming, context 24"),
        ({"seq_len": 4096}, "non-overlapping windows of 60"),
        ({"stride": 11, "ngram": NgramSettings(enabled=True)}, "windows of 24, stride 11"),
    ],
)
def test_every_way_of_scoring_is_held_against_its_scorer(
    data: Path, tmp_path: Path, way: dict[str, Any], said: str
) -> None:
    text = DataSettings(path=str(data), tokenizer="bytes")
    report = audit(artifact_of(tmp_path / "model.birdie", text, **way), tokens=60)
    assert not report.failed
    (finding,) = [each for each in report.of(CAUSAL) if each.by == "batch"]
    assert said in finding.evidence


def test_a_batched_score_that_is_not_the_scorers_fails(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if `birdie evaluate` read other tokens than it was shown."""

    class Other(SteppedWindows):
        def reveal(self, token: int) -> None:
            super().reveal((token + 1) % 260)

    monkeypatch.setattr(ways, "SteppedWindows", Other)
    path = artifact_of(tmp_path / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"))
    report = audit(path, tokens=8)
    assert "fail" in {each.verdict for each in report.of(CAUSAL) if each.by == "batch"}


def test_time_is_measured_when_asked(trained: Path) -> None:
    found = [each for each in audit(trained / "model.birdie", run=True, tokens=8).findings if each.by == "clock"]
    assert len(found) == 1
    assert "targets took" in found[0].evidence


def test_a_run_folder_is_audited_with_its_artifact(trained: Path) -> None:
    report = audit(trained, tokens=8)
    assert report.kind == "folder"
    assert report.verdict(TRAIN_TIME) == "pass"
    assert report.verdict(CAUSAL) == "pass"
    assert not report.failed


def test_copied_documents_are_found(trained: Path, data: Path, tmp_path: Path) -> None:
    val, train = next(data.glob("*_val_*.bin")), next(data.glob("*_train_*.bin"))
    report = audit(trained / "model.birdie", train=[str(train), str(val)], tokens=8)
    assert report.verdict(OVERLAP) == "fail"
    (finding,) = [each for each in report.of(OVERLAP) if each.verdict == "fail"]
    assert "validation documents are among" in finding.evidence
    other = tmp_path / "x_val_000000.bin"
    write_shard(other, np.array(read_shard(val)))
    alone = audit(trained / "model.birdie", data=str(other), tokens=8)
    assert alone.verdict(OVERLAP) == "unknown"
    assert alone.verdict(BYTES) == "pass"
    with pytest.raises(DataError, match="matches no shard"):
        audit(trained / "model.birdie", data=str(tmp_path / "none.bin"))


def test_an_artifact_without_its_text_is_probed_all_the_same(trained: Path, data: Path) -> None:
    hidden = data.with_name("elsewhere")
    data.rename(hidden)
    try:
        report = audit(trained / "model.birdie", tokens=8)
    finally:
        hidden.rename(data)
    assert report.verdict(BYTES) == "unknown"
    assert report.verdict(CAUSAL) == "pass"
    assert any("--data" in each.evidence for each in report.of(BYTES))


def test_a_damaged_artifact_fails(trained: Path, tmp_path: Path) -> None:
    blob = bytearray((trained / "model.birdie").read_bytes())
    blob[len(blob) // 2] ^= 0xFF
    (tmp_path / "model.birdie").write_bytes(blob)
    report = audit(tmp_path / "model.birdie")
    assert report.verdict(RUNS) == "fail"


def test_a_faultless_folder_breaks_nothing(ask: Ask, tmp_path: Path) -> None:
    code, answer, _ = ask("audit", submission(tmp_path / "record"))
    broken = [each for each in answer["findings"] if each["verdict"] == "fail"]
    assert (code, broken) == (0, [])
    for name in ("seeds", "size", "train-time", "eval-time", "whole-split", "byte-count"):
        assert answer["verdicts"][name] == "pass", name
    assert answer["verdicts"]["causal"] == "unknown"


def test_each_fault_of_a_folder_is_found_and_said(ask: Ask, tmp_path: Path) -> None:
    folder = submission(tmp_path / "record", bytes_total=16_500_000, seeds=[1337, 42])
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=700_000, code=137))
    (folder / "logs").mkdir()
    (folder / "logs" / "more.txt").write_text(later(shards=1499, seed=8))
    code, answer, err = ask("audit", folder)
    assert code == 1
    assert err == ""
    for name in ("seeds", "size", "train-time", "no-overlap"):
        assert answer["verdicts"][name] == "fail", name
    lines = {(each["rule"], Path(each["path"]).name, each["line"]) for each in answer["findings"] if each["path"]}
    assert ("train-time", "train_seed7.log", 19) in lines
    assert ("no-overlap", "more.txt", 8) in lines


def test_the_table_names_what_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submission(tmp_path / "record")
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=700_000, code=137))
    assert run(build_app, ["audit", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "✗ fail" in out
    assert "train_seed7.log:19" in out
    assert "broken: train-time" in out
    assert all(rule.name in out for rule in RULES)


def test_logs_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = submission(tmp_path / "record")
    shutil.move(folder / "train_seed7.log", tmp_path / "seed7.log")
    assert audit(folder).verdict(SEEDS) == "fail"
    assert audit(folder, logs=[tmp_path / "seed7.log"]).verdict(SEEDS) == "pass"
    with pytest.raises(DataError, match="no line of a training run"):
        audit(folder, logs=[folder / "README.md"])
    with pytest.raises(DataError, match="cannot read log"):
        audit(folder, logs=[folder / "none.log"])


def test_a_track_without_a_cap(tmp_path: Path) -> None:
    folder = submission(tmp_path / "track_non_record_16mb")
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=7_000_000, code=137))
    with (folder / "train_gpt.py").open("a") as file:
        file.write("MAX_WALLCLOCK_SECONDS = 14400\n")
    report = audit(folder)
    assert report.verdict(TRAIN_TIME) == "unknown"
    assert any("no cap on training time" in each.evidence for each in report.of(TRAIN_TIME) if each.by == "scan")
    assert audit(folder / "train_gpt.py").verdict(TRAIN_TIME) == "unknown"
    capped = shutil.copytree(folder, tmp_path / "track_10min_16mb" / "2026_UnlimitedContext")
    found = {each.by for each in audit(capped).of(TRAIN_TIME) if each.verdict == "fail"}
    assert found == {"scan", "log"}
    assert audit(capped / "train_gpt.py").verdict(TRAIN_TIME) == "fail"


def test_files_that_are_none_do_not_end_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = submission(tmp_path / "record")
    for broken in ("{", "[" * 10_000, '{"step": 1}', "\ud800"):
        (folder / "history.jsonl").write_bytes(broken.encode("utf-8", "surrogatepass"))
        assert any("no history of a run" in each.evidence for each in audit(folder).of(TRAIN_TIME))
    (folder / "README.md").write_text("val_bpb 1.0123\n" * 100_000)
    assert any("README has 1,500,000 bytes" in each.evidence for each in audit(folder).of(SEEDS))
    monkeypatch.setattr("birdie.golf.audit.audit.MAX_WEIGHT", 100)  # no log is read
    assert audit(folder).verdict(SEEDS) == "unknown"
    (folder / "submission.json").write_text("[" * 1_000_001)
    assert audit(folder).verdict(SEEDS) == "unknown"


def test_a_script_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, parsed, parse = submission(tmp_path / "record"), [], ast.parse
    monkeypatch.setattr(
        ast, "parse", lambda source, *more, **named: parsed.append(source) or parse(source, *more, **named)
    )
    audit(folder)
    assert parsed.count((folder / "train_gpt.py").read_bytes()) == 1


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    report = audit(script)
    assert report.kind == "script"
    assert not (tmp_path / "ran").exists()
    assert report.verdict(RUNS) == "unknown"
    assert report.verdict(SIZE) == "unknown"


def test_our_own_script_breaks_nothing() -> None:
    assert not audit(ROOT / "train_gpt.py").failed


@pytest.mark.parametrize(
    ("name", "why"),
    [("none", "there is nothing at"), ("empty", "holds no script"), ("README.md", "no .birdie file, no Python script")],
)
def test_what_cannot_be_audited(ask: Ask, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("# nothing\n")
    code, answer, _ = ask("audit", tmp_path / name)
    assert code == 1
    assert answer["error"]["type"] == "ConfigError"
    assert why in answer["error"]["message"]


def test_numbers_out_of_range(trained: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        audit(trained / "model.birdie", tokens=1)


def test_a_recipe_that_trains_on_validation_fails(trained: Path, data: Path, tmp_path: Path) -> None:
    val = (str(next(data.glob("*_val_*.bin"))),)
    text = DataSettings(train=val, val=val, tokenizer="bytes")
    assert audit(artifact_of(tmp_path / "model.birdie", text), tokens=8).verdict(VALIDATION) == "fail"
    assert audit(trained / "model.birdie", tokens=8).verdict(VALIDATION) == "unknown"


def test_another_tokenizer_than_that_of_training_fails(data: Path, tmp_path: Path) -> None:
    path = artifact_of(tmp_path / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"))
    vocabulary = train_sentencepiece(["some words to learn from, and more of them"] * 30, 300)
    (tmp_path / "other.model").write_bytes(vocabulary.model_bytes)
    report = audit(path, tokenizer=str(tmp_path / "other.model"), tokens=8)
    assert report.verdict(BYTES) == "fail"
    assert any("was trained with tokenizer" in each.evidence for each in report.of(BYTES))


def test_a_claim_that_is_no_json_is_a_finding(tmp_path: Path) -> None:
    folder = submission(tmp_path / "record")
    (folder / "submission.json").write_text("{")
    report = audit(folder)
    assert report.verdict(SEEDS) == "fail"
    assert any("is no JSON object" in each.evidence for each in report.of(SEEDS))


def test_shards_of_unknown_use_prove_nothing(data: Path, tmp_path: Path) -> None:
    path = artifact_of(tmp_path / "model.birdie", DataSettings(path="elsewhere", tokenizer="bytes"))
    report = audit(path, data=str(data), tokens=8)
    assert report.verdict(OVERLAP) == "unknown"
    assert any("whether the model was trained on these is not known" in each.evidence for each in report.of(OVERLAP))
    train = str(next(data.glob("*_train_*.bin")))
    assert audit(path, data=str(data), train=[train], tokens=8).verdict(OVERLAP) == "pass"


@pytest.mark.parametrize(("more", "verdict"), [(0, "pass"), (1, "fail"), (200, "fail")])
def test_a_sidecar_is_held_against_the_text(tmp_path: Path, more: int, verdict: Verdict) -> None:
    """200 bytes too many are refused at once; one in some thousands is only seen by decoding."""
    texts = [f"{line} Some NASA Words" for line in (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[:9]]
    tokenizer = train_caseops(texts * 3, 400, tmp_path / "caseops.model")
    stream = np.concatenate([np.insert(ids, 0, tokenizer.bos_id) for ids in tokenizer.encode_batch(texts)])
    counts = tokenizer.byte_table().count_document(stream, tokenizer.bos_id)
    places = np.flatnonzero(counts)
    counts[places[-min(more, len(places)) :][:more]] += 1
    write_shard(tmp_path / "fineweb_val_000000.bin", stream)
    write_shard(tmp_path / "fineweb_val_bytes_000000.bin", counts)
    text = DataSettings(path=str(tmp_path), tokenizer=str(tmp_path / "caseops.model"))
    report = audit(artifact_of(tmp_path / "model.birdie", text, tokenizer), tokens=8)
    assert report.verdict(BYTES) == verdict, report.of(BYTES)
    assert not [rule for rule in report.failed if rule != BYTES]


@pytest.mark.parametrize(("stride", "bos_id"), [(12, None), (5, None), (3, 1)])
def test_kept_keys_say_what_whole_windows_say(stride: int, bos_id: int | None) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=30, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1)).eval()
    stepped = SteppedWindows(model, 12, stride, bos_id=bos_id, temperature=1.5)
    whole = WindowScorer(model, 12, stride, bos_id=bos_id, temperature=1.5)
    draw = np.random.default_rng(stride)
    for token in draw.integers(0, 30, 50).tolist():
        for scorer in (stepped, whole):
            scorer.reveal(token)
        if draw.random() < 0.7:  # not every target is asked for
            assert torch.allclose(stepped.predict(), whole.predict(), atol=2e-5)
            assert torch.equal(stepped.predict(), stepped.predict())


@pytest.mark.parametrize("adapt", ["ttt-sgd", "ttt-lora", "ttt-multi-phase"])
def test_learning_what_was_scored_is_legal(data: Path, tmp_path: Path, adapt: str) -> None:
    text = DataSettings(path=str(data), tokenizer="bytes")
    report = audit(artifact_of(tmp_path / "model.birdie", text, mode=adapt), tokens=120)
    assert not report.failed, report.findings
    (learned,) = [each for each in report.of(SCORE_FIRST) if each.by == "ledger"]
    assert learned.verdict == "pass"
    assert f"{adapt}: 72 targets were scored once" in learned.evidence
    (causal,) = [each for each in report.of(CAUSAL) if each.by == "perturbation"]
    assert causal.verdict == ("unknown" if adapt == "ttt-multi-phase" else "pass")


def test_learning_first_is_caught(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that learns from each chunk before it scores it, and tells the ledger nothing."""

    def cheat(scoring, windows, settings):
        model, tokens = scoring.model, scoring.tokens
        trainer = SGDTrainer(model, settings)
        told = Ledger(len(tokens) - 1)
        told.score(0, len(tokens) - 1)  # a lie
        trainer.train(tokens, [(0, len(tokens) - 1)], told, length=scoring.length, factor=50.0)
        score_windows(scoring, windows)
        trainer.restore()
        return TrainingReport(0.0, 0.0, 1, trainer.steps, trainer.tokens, "")

    monkeypatch.setattr(sgd, "score_chunks", cheat)
    path = artifact_of(tmp_path / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"), mode="ttt-sgd")
    report = audit(path, tokens=120)
    assert report.verdict(CAUSAL) == "fail"
    (finding,) = [each for each in report.of(CAUSAL) if each.verdict == "fail"]
    assert "with tokens that come after it" in finding.evidence


def test_learning_that_the_ledger_refuses_fails(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(scoring, _windows, _settings):
        scoring.sink.ledger.learn((0, len(scoring.tokens) - 1))

    monkeypatch.setattr(sgd, "score_chunks", early)
    path = artifact_of(tmp_path / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"), mode="ttt-sgd")
    report = audit(path, tokens=60)
    assert report.verdict(SCORE_FIRST) == "fail"
    assert any("learn from target 0 before it is scored" in each.evidence for each in report.of(SCORE_FIRST))
