"""A chain of checkpoints: every one comes back bit for bit, and what is damaged costs what follows it, with a word."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import birdie
from birdie.artifact.container import Reader
from birdie.artifact.file import File
from birdie.artifact.links import read_link
from birdie.chain.chain_folder import Chain
from birdie.chain.chain_rows import Row, find_link, survey
from birdie.chain.checkpoint_series import series, without_number
from birdie.chain.link_content import restore
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.tensors import FORMATS
from birdie.errors import ArtifactError, ConfigError, OutputError
from tests.kills import kill_at_each_call

STEPS = (8, 9, 10, 11)


def write_checkpoint(folder: Path, step: int, seed: int = 0) -> Path:
    """Write a checkpoint of a run whose weights move a little with every step, and whose moments are noise."""
    first, moves = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    state = {"embedding": torch.randn(64, 32, generator=first), "norm": torch.ones(8)}
    half = torch.randn(48, 40, generator=first).bfloat16()
    for _ in range(step):
        state["embedding"] += 1e-4 * torch.randn(64, 32, generator=moves)
        half = (half.float() + 1e-3 * torch.randn(48, 40, generator=moves)).bfloat16()
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    save_file(state | {"middle": half}, path / "model.safetensors", {"format": "pt"})
    moments = {0: {"exp_avg": torch.randn(64, 32, generator=moves), "step": torch.tensor(float(step))}}
    torch.save({"state": moments, "param_groups": [{"lr": 0.1}]}, path / "optimizer.pt")
    (path / "sub").mkdir()
    (path / "sub" / "state.json").write_text(json.dumps({"step": step}))
    (path / "vocabulary.txt").write_text("a b c\n" * 200)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    for step in STEPS:
        write_checkpoint(root, step)
    return root


@pytest.fixture(scope="module")
def built(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain in which steps 8 and 11 stand alone."""
    folder = tmp_path_factory.mktemp("chain") / "run.birdie"
    extend(folder, checkpoints)
    return folder


@pytest.fixture
def chain(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "run.birdie")


def extend(folder: Path, checkpoints: Path, **options: Any) -> list[Row]:
    chain = Chain(folder, full_every=3)
    chain.require_writable()
    return [*chain.extend(series(checkpoints), **options)]


def grow(folder: Path, checkpoints: Path) -> None:
    extend(folder, checkpoints)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_restored(chain: Path, checkpoint: Path, target: Path) -> None:
    restore(chain / f"{checkpoint.name}.birdie", target)
    assert content(target) == content(checkpoint)


def damage(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def at_of(link: Path, tensor: str) -> int:
    """Return where the payload of a tensor begins."""
    with Reader(link) as reader:
        return reader.header(tensor).offset


def test_every_step_comes_back_bit_for_bit(chain: Path, checkpoints: Path, tmp_path: Path) -> None:
    bases = {row.step: row.base for row in survey(chain)}
    assert bases == {8: "", 9: "step-8.birdie", 10: "step-9.birdie", 11: ""}
    for step in STEPS:
        require_restored(chain, checkpoints / f"step-{step}", tmp_path / f"{step}")


def test_a_difference_takes_fewer_bytes_and_moments_stand_alone(chain: Path) -> None:
    rows = {row.step: row for row in survey(chain)}
    assert rows[9].bytes < 0.9 * rows[8].bytes
    assert all(row.bytes < row.checkpoint_bytes for row in rows.values() if row.checkpoint_bytes)
    stored = {tensor.name: tensor.scheme for tensor in birdie.inspect(chain / "step-9.birdie").tensors}
    assert stored["model.safetensors/embedding"] == stored["model.safetensors/middle"] == "delta"
    assert stored["optimizer.pt/state/0/exp_avg"] == "lossless"
    assert [*birdie.inspect(chain / "step-9.birdie").files] == ["optimizer.pt", "sub/state.json"], "others are the same"


def test_the_same_checkpoints_give_the_same_bytes(chain: Path, checkpoints: Path, tmp_path: Path) -> None:
    extend(tmp_path / "again.birdie", checkpoints)
    assert content(tmp_path / "again.birdie") == content(chain)


@given(
    seed=st.integers(0, 999),
    dtypes=st.lists(st.sampled_from([kind for kind in FORMATS if kind is not torch.complex32]), min_size=3, max_size=3),
    shape=st.sampled_from([(), (1,), (700, 3), (0, 3), (2, 3, 300)]),
)
@settings(max_examples=15, deadline=None)
def test_any_bits_of_any_dtype_come_back(
    seed: int, dtypes: list[torch.dtype], shape: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, generator = tmp_path_factory.mktemp("run"), torch.Generator().manual_seed(seed)
    for step, kind in enumerate(dtypes):
        count = torch.Size(shape).numel() * kind.itemsize
        raw = torch.randint(0, 2 if kind is torch.bool else 256, (count,), generator=generator).to(torch.uint8)
        content = {"a": raw.view(kind).reshape(shape), "same": torch.arange(300)}
        torch.save(content, root / f"step_{step}.pt")
    extend(root / "run.birdie", root)
    for step in range(3):
        restore(root / "run.birdie" / f"step_{step}.birdie", root / "x.pt")
        assert (root / "x.pt").read_bytes() == (root / f"step_{step}.pt").read_bytes()


def test_a_link_loads_without_a_base_and_decodes_what_is_needed(
    chain: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_file(checkpoints / "step-10" / "model.safetensors")
    loaded = birdie.load(chain / "step-10.birdie")
    assert {name: torch.equal(loaded[f"model.safetensors/{name}"], weight) for name, weight in expected.items()} == (
        dict.fromkeys(expected, True)
    )
    decoded: list[str] = []
    decode_all = File.decode_all

    def recorded(file: File, names: Any = None, workers: Any = None) -> Any:
        decoded.extend(names)
        return decode_all(file, names, workers)

    monkeypatch.setattr(File, "decode_all", recorded)
    part = birdie.load(chain / "step-10.birdie", prefix="model.safetensors/", names=["middle"])
    assert torch.equal(part["middle"], expected["middle"])
    assert {*decoded} == {"model.safetensors/middle"}
    module = torch.nn.Module()
    module.middle = torch.nn.Parameter(torch.zeros(48, 40, dtype=torch.bfloat16))
    birdie.load(chain / "step-10.birdie", into=module, prefix="model.safetensors/", names=["middle"], lazy=True)
    assert torch.equal(module.middle, expected["middle"])


def test_only_new_checkpoints_are_encoded(checkpoints: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "run", tmp_path / "run.birdie"
    shutil.copytree(checkpoints / "step-8", source / "step-8")
    extend(folder, source)
    first = (folder / "step-8.birdie").stat()
    for step in STEPS[1:]:
        shutil.copytree(checkpoints / f"step-{step}", source / f"step-{step}")
    shutil.rmtree(source / "step-8")  # its link serves as the base
    assert [row.added for row in extend(folder, source)] == [True, True, True]
    assert (folder / "step-8.birdie").stat().st_mtime_ns == first.st_mtime_ns
    assert [row.added for row in extend(folder, checkpoints)] == [False] * 4
    for step in STEPS:
        require_restored(folder, checkpoints / f"step-{step}", tmp_path / f"{step}")


def test_a_damaged_link_costs_what_follows_it_and_is_written_again(
    chain: Path, checkpoints: Path, tmp_path: Path
) -> None:
    damage(chain / "step-9.birdie", at_of(chain / "step-9.birdie", "model.safetensors/embedding"))
    rows = {row.step: row.damage for row in survey(chain)}
    assert (rows[8], rows[11]) == ("", "")
    assert "checksum" in rows[9]
    assert "step-9.birdie" in rows[10]
    for step in (9, 10):
        with pytest.raises(ArtifactError, match=r"step-9\.birdie"):
            restore(chain / f"step-{step}.birdie", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    require_restored(chain, checkpoints / "step-11", tmp_path / "11")
    assert [row.added for row in extend(chain, checkpoints)] == [False, True, False, False]
    assert not any(row.damage for row in survey(chain))
    require_restored(chain, checkpoints / "step-10", tmp_path / "10")


def test_damage_of_a_tensor_counts_under_all_of_its_names(tmp_path: Path) -> None:
    source, folder = tmp_path / "run", tmp_path / "run.birdie"
    source.mkdir()
    weight = torch.randn(64, 32)
    for step in (1, 2):
        other = weight if step == 1 else weight + 1e-5 * torch.randn(64, 32)
        torch.save({"a": weight, "b": other if step == 2 else weight.clone()}, source / f"step_{step}.pt")
        weight = weight + 1e-5
    extend(folder, source)
    damage(folder / "step_1.birdie", at_of(folder / "step_1.birdie", "a"))
    assert [row.step for row in survey(folder) if row.damage] == [1, 2]
    with pytest.raises(ArtifactError, match="checksum"):
        restore(folder / "step_2.birdie", tmp_path / "x.pt")


def test_damage_of_what_is_stored_alone_costs_one_checkpoint(chain: Path, checkpoints: Path, tmp_path: Path) -> None:
    damage(chain / "step-9.birdie", at_of(chain / "step-9.birdie", "optimizer.pt/state/0/exp_avg"))
    assert [row.step for row in survey(chain) if row.damage] == [9]
    require_restored(chain, checkpoints / "step-10", tmp_path / "10")


def test_a_new_link_is_no_difference_to_a_damaged_one(chain: Path, tmp_path: Path) -> None:
    damage(chain / "step-11.birdie")
    write_checkpoint(tmp_path / "run", 12)
    notes: list[str] = []
    rows = [*Chain(chain, notify=notes.append).extend(series(tmp_path / "run"))]
    assert [row.base for row in rows] == [""]
    assert any("step-11.birdie" in note for note in notes)
    require_restored(chain, tmp_path / "run" / "step-12", tmp_path / "12")


@pytest.mark.parametrize("follows_run", [True, False])
def test_another_checkpoint_of_a_step_is_an_error_or_replaces_it_and_what_follows(
    follows_run: bool, chain: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "run", 10, seed=7)
    if not follows_run:
        with pytest.raises(OutputError, match="another checkpoint of step 10"):
            extend(chain, tmp_path / "run")
    [*Chain(chain, follows_run=follows_run).extend(series(tmp_path / "run"), replace_others=not follows_run)]
    assert [row.step for row in survey(chain)] == [8, 9, 10]
    require_restored(chain, other, tmp_path / "10")


def test_a_run_that_went_back_removes_later_steps_only_when_it_adds_one(chain: Path, tmp_path: Path) -> None:
    known = write_checkpoint(tmp_path / "known", 9)
    [*Chain(chain, follows_run=True).extend({9: known})]
    assert [row.step for row in survey(chain)] == [8, 9, 10, 11]
    other = write_checkpoint(tmp_path / "other", 9, seed=3)
    torch.save(torch.ones(3), tmp_path / "other" / "step_3.pt")
    [*Chain(chain, follows_run=True).extend({9: other})]
    assert [row.step for row in survey(chain)] == [8, 9]


def test_the_door_says_what_is_wrong(chain: Path, checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full_every is 0"):
        Chain(chain, full_every=0)
    (chain / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"'notes\.txt'"):
        extend(chain, checkpoints)
    (chain / "notes.txt").unlink()
    with pytest.raises(ArtifactError, match="no checkpoint of step 5, but 4 of steps 8 to 11"):
        find_link(chain, 5)
    with pytest.raises(ArtifactError, match="no link"):
        survey(tmp_path / "nothing")
    birdie.save({"a": torch.ones(3)}, chain / "plain.birdie")
    with pytest.raises(ArtifactError, match=r"plain\.birdie is no link"):
        read_link(chain / "plain.birdie")
    with pytest.raises(OutputError, match=r"'plain\.birdie'"):
        extend(chain, checkpoints)
    assert find_link(chain, 8).name == "step-8.birdie"


@pytest.mark.nightly
def test_whoever_is_killed_leaves_a_chain_and_goes_on(chain: Path, checkpoints: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(chain, source)
    (chain / "step-10.birdie").unlink()
    (chain / "step-11.birdie").unlink()
    expected = {path.name: path.read_bytes() for path in source.iterdir()}
    deaths = 0
    for _ in kill_at_each_call(grow, chain, checkpoints):
        left = {path.name: path.read_bytes() for path in chain.iterdir() if path.suffix == ".birdie"}
        assert left.items() <= expected.items()
        deaths += 1
    assert deaths > 5
    assert content(chain) == expected, "nothing else is left"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def call(*tokens: object) -> tuple[int, dict[str, Any]]:
        code = run(build_app, [*map(str, tokens), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_the_commands(
    ask: Callable[..., tuple[int, dict[str, Any]]],
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chain = tmp_path / "run.birdie"
    code, answer = ask("compress", checkpoints, "-o", chain, "--full-every", 2)
    assert (code, answer["added"], len(answer["checkpoints"]), answer["left_out"]) == (0, 4, 4, [])
    assert answer["bytes"] == sum(path.stat().st_size for path in chain.iterdir())
    code, answer = ask("compress", checkpoints, "-o", f"{chain}/")
    assert (code, answer["added"]) == (0, 0)
    code, answer = ask("inspect", chain)
    assert (code, answer["damaged"], [row["step"] for row in answer["checkpoints"]]) == (0, 0, [*STEPS])
    code, answer = ask("decompress", chain, "--step", 9, "-o", tmp_path / "9")
    assert (code, content(tmp_path / "9")) == (0, content(checkpoints / "step-9"))
    code, _ = ask("decompress", chain / "step-10.birdie", "-o", tmp_path / "10")
    assert (code, content(tmp_path / "10")) == (0, content(checkpoints / "step-10"))
    damage(chain / "step-10.birdie", at_of(chain / "step-10.birdie", "model.safetensors/embedding"))
    code, answer = ask("inspect", chain)
    assert (code, answer["damaged"]) == (1, 2)
    assert run(build_app, ["inspect", str(chain)]) == 1
    assert "step-10.birdie, step-11.birdie cannot be restored: " in capsys.readouterr().out


def test_checkpoints_that_are_files(
    ask: Callable[..., tuple[int, dict[str, Any]]], checkpoints: Path, tmp_path: Path
) -> None:
    for step in STEPS:
        shutil.copy(checkpoints / f"step-{step}" / "model.safetensors", tmp_path / f"step_{step}.safetensors")
    chain, original = tmp_path / "run.birdie", tmp_path / "step_9.safetensors"
    assert ask("compress", tmp_path, "-o", chain)[0] == 0
    assert ask("decompress", chain, "--step", 9, "-o", tmp_path / "x.safetensors")[0] == 0
    assert ask("decompress", chain, "--step", 9, "-o", tmp_path / "folder")[0] == 0
    assert (tmp_path / "x.safetensors").read_bytes() == original.read_bytes()
    assert content(tmp_path / "folder") == {original.name: original.read_bytes()}
    assert ask("decompress", chain, "--step", 9, "-o", tmp_path / "x.pt")[0] == 0
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(torch.equal(state[name], one) for name, one in load_file(original).items())


@pytest.fixture
def named_run(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 4, the best of which is a copy, and a last one that is ahead of them."""
    folder, weight = tmp_path / "run", torch.randn(64, 32)
    folder.mkdir()
    for step in range(1, 5):
        weight = weight + 1e-4 * torch.randn(64, 32)
        torch.save({"step": step, "model": {"w": weight}}, folder / f"step_{step}.pt")
    (folder / "best.pt").symlink_to("step_2.pt")
    torch.save({"step": 6, "model": {"w": weight + 1e-4}}, folder / "last.pt")
    torch.save({"w": weight}, folder / "final.bin")
    return folder


def test_checkpoints_without_a_number_are_links_that_come_back_under_their_names(
    ask: Callable[..., tuple[int, dict[str, Any]]], named_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = tmp_path / "chain"
    code, answer = ask("compress", named_run, "-o", f"{chain}/", "--full-every", 2)
    rows = {row["name"]: row for row in answer["checkpoints"]}
    assert (code, answer["added"], answer["left_out"]) == (0, 7, [])
    assert [(row["step"], row["checkpoint"]) for row in rows.values()] == [
        *((step, "") for step in range(1, 5)), (2, "best.pt"), (4, "final.bin"), (6, "last.pt")
    ]  # fmt: skip
    bases = {name: rows[f"{name}.birdie"]["base"] for name in ("best", "final", "last")}
    assert bases == {"best": "step_2.birdie", "final": "step_4.birdie", "last": "step_4.birdie"}
    assert all(rows[f"{name}.birdie"]["bytes"] < 0.2 * rows["step_1.birdie"]["bytes"] for name in ("best", "final"))
    for path in named_run.iterdir():
        code, answer = ask("decompress", chain / f"{path.stem}.birdie", "-o", tmp_path / "back" / path.name)
        assert (code, answer["written"]) == (0, "file")
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    for step, name in ((2, "step_2.pt"), (6, "last.pt")):
        assert ask("decompress", chain, "--step", step, "-o", f"{tmp_path}/{step}/")[0] == 0
        assert content(tmp_path / f"{step}") == {name: (named_run / name).read_bytes()}
    assert ask("inspect", chain)[1]["damaged"] == 0
    assert run(build_app, ["inspect", str(chain)]) == 0
    assert "6 last.pt" in capsys.readouterr().out
    assert run(build_app, ["compress", str(named_run), "-o", str(chain), "--skip", "best*"]) == 0
    assert f"birdie decompress {chain}/last.birdie -o last.pt" in " ".join(capsys.readouterr().out.split())


def test_a_checkpoint_without_a_number_is_replaced_when_the_run_goes_on(named_run: Path, tmp_path: Path) -> None:
    chain, notes = tmp_path / "chain", list[str]()

    def add() -> dict[str, Row]:
        checkpoints = series(named_run)
        rows = Chain(chain, notify=notes.append).extend(checkpoints, named=without_number(named_run, checkpoints))
        return {row.name: row for row in rows}

    assert all(row.added for row in add().values())
    assert not any(row.added for row in add().values())
    last = torch.load(named_run / "last.pt", weights_only=True)
    for step in (7, 8):
        torch.save({"step": step, "model": {"w": last["model"]["w"] + step * 1e-5}}, named_run / f"step_{step}.pt")
    shutil.copy(named_run / "step_8.pt", named_run / "last.pt")
    rows = add()
    assert {name for name, row in rows.items() if row.added} == {"step_7.birdie", "step_8.birdie", "last.birdie"}
    assert notes == [f"last.pt was of step 6 in {chain}; it is replaced"]
    assert rows["step_7.birdie"].base == "step_4.birdie", "nothing is a delta to what will be replaced"
    assert rows["last.birdie"].base == "step_8.birdie"
    damage(chain / "step_8.birdie", at_of(chain / "step_8.birdie", "model/w"))
    assert {row.name for row in survey(chain) if row.damage} == {"step_8.birdie", "last.birdie"}
    with pytest.raises(ArtifactError, match=r"step_8\.birdie"):
        restore(chain / "last.birdie", tmp_path / "x.pt")
    assert {name for name, row in add().items() if row.added} == {"step_8.birdie"}
    restore(chain / "last.birdie", tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == (named_run / "last.pt").read_bytes()


def test_a_copy_of_many_small_tensors_takes_next_to_nothing(tmp_path: Path) -> None:
    state = {f"layers.{index}.weight": torch.randn(64) for index in range(300)}
    torch.save({"step": 1, "model": state}, tmp_path / "step_1.pt")
    shutil.copy(tmp_path / "step_1.pt", tmp_path / "last.pt")
    torch.save(state | {"layers.0.weight": torch.randn(64), "head": torch.ones(2, 2)}, tmp_path / "other.pt")
    paths = {tmp_path / name: 1 for name in ("last.pt", "other.pt")}
    rows = {row.name: row for row in Chain(tmp_path / "c").extend({1: tmp_path / "step_1.pt"}, named=paths)}
    full = rows["step_1.birdie"].bytes
    for name, share in {"last": 0.08, "other": 0.25}.items():
        assert rows[f"{name}.birdie"].bytes < share * full
        restore(tmp_path / "c" / f"{name}.birdie", tmp_path / "back.pt")
        assert (tmp_path / "back.pt").read_bytes() == (tmp_path / f"{name}.pt").read_bytes()


def test_files_of_other_names_share_what_is_around_their_tensors(tmp_path: Path) -> None:
    """Damage there costs the files that come after it."""
    for step in (1, 2, 3):
        save_file({"w": torch.randn(64, 32)}, tmp_path / f"step_{step}.safetensors", {"notes": "ab" * 500})
    extend(tmp_path / "c", tmp_path)
    assert [*birdie.inspect(tmp_path / "c" / "step_3.birdie").files] == []
    for step in (1, 2, 3):
        restore(tmp_path / "c" / f"step_{step}.birdie", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (tmp_path / f"step_{step}.safetensors").read_bytes()
    damage(tmp_path / "c" / "step_1.birdie", at_of(tmp_path / "c" / "step_1.birdie", "\0files"))
    assert [row.step for row in survey(tmp_path / "c") if row.damage] == [1, 2, 3]
    with pytest.raises(ArtifactError, match="checksum"):
        restore(tmp_path / "c" / "step_3.birdie", tmp_path / "x")


def test_two_names_of_one_step_are_both_kept(tmp_path: Path) -> None:
    torch.save({"step": 1, "w": torch.ones(64, 32)}, tmp_path / "step_1.pt")
    for name in ("last.pt", "last.bin"):
        torch.save({"step": 5, "w": torch.randn(64, 32)}, tmp_path / name)
    checkpoints = series(tmp_path)
    rows = [*Chain(tmp_path / "c").extend(checkpoints, named=without_number(tmp_path, checkpoints))]
    assert [row.name for row in rows] == ["step_1.birdie", "last.birdie", "last.pt.birdie"]
    with pytest.raises(ArtifactError, match="are both of step 5; give one of them"):
        find_link(tmp_path / "c", 5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("compress", "{run}", "-o", "{new}", "--bits", "4"), "kept losslessly as a chain"),
        (("compress", "{run}", "-o", "{new}", "--keep", "*"), "without --keep"),
        (("compress", "{run}", "-o", "{run}"), "is read"),
        (("compress", "{run}/step-8/optimizer.pt", "-o", "{new}", "--full-every", "3"), "--full-every is for a folder"),
        (("compress", "{run}", "-o", "{new}", "--full-every", "0"), "full_every is 0"),
        (("decompress", "{chain}", "-o", "{new}"), "4 checkpoints, step-8 to step-11; name one by --step"),
        (("decompress", "{chain}", "--step", "4", "-o", "{new}"), "no checkpoint of step 4"),
        (("decompress", "{chain}/step-9.birdie", "--step", "9", "-o", "{new}"), "--step is for the folder"),
        (("decompress", "{chain}/step-9.birdie", "-o", "{new}.pt"), "holds the folder of a checkpoint"),
        (("decompress", "{chain}/step-9.birdie", "-o", "{new}", "--base", "{run}/step-8"), "drop --base"),
        (("decompress", "{chain}/step-9.birdie", "-o", "{run}"), "has content"),
        (("decompress", "{chain}/step-9.birdie", "-o", "{new}", "--max-size", "1000"), "more than the 1,000 allowed"),
        (("inspect", "{run}"), "holds no link"),
        (("inspect", "{chain}", "--metadata"), "--metadata is for one file"),
    ],
)
def test_wrong_commands_end_with_one_sentence_and_leave_nothing(
    tokens: tuple[str, ...],
    message: str,
    ask: Callable[..., tuple[int, dict[str, Any]]],
    built: Path,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    paths = {"run": checkpoints, "chain": built, "new": tmp_path / "new"}
    code, answer = ask(*(token.format(**paths) for token in tokens))
    assert code == 1
    assert message in answer["error"]["message"]
    assert not [*tmp_path.iterdir()]
