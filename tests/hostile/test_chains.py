"""Hostile chains: a link that lies about its base, its files or itself is refused in one sentence, and costs little."""

import json
import random
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import birdie
from birdie.artifact import container, links
from birdie.artifact.container import Reader
from birdie.chain.chain_folder import Chain
from birdie.chain.chain_rows import survey
from birdie.chain.checkpoint_series import series
from birdie.chain.link_content import restore
from birdie.errors import ArtifactError

STEPS = (1, 2, 3, 4)
MUTANTS = 10
UNSEEN = ("does not come back", "do not add up", "order of tensors", "are there", "give another base", "other values")


def write_run(folder: Path) -> dict[int, dict[str, bytes]]:
    """Write the checkpoints of a run; return step → name → content of their files."""
    torch.manual_seed(0)
    state = {"a": torch.randn(40, 16), "b": torch.randn(300).half()}
    contents = {}
    for step in STEPS:
        state["a"] += 1e-4 * torch.randn(40, 16)
        path = folder / f"step-{step}"
        path.mkdir(parents=True)
        save_file(state, path / "model.safetensors")
        (path / "state.json").write_text(json.dumps({"step": step}))
        (path / "tokens.txt").write_text("a\n" * 99)
        contents[step] = {file.name: file.read_bytes() for file in path.iterdir()}
    return contents


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, bytes]]]:
    root = tmp_path_factory.mktemp("hostile")
    contents = write_run(root / "run")
    [*Chain(root / "run.birdie", full_every=9).extend(series(root / "run"))]
    return root / "run.birdie", contents


@pytest.fixture
def chain(built: tuple[Path, Any], tmp_path: Path) -> Path:
    return shutil.copytree(built[0], tmp_path / "run.birdie")


def refusal_of(link: Path, target: Path) -> str:
    """Restore a link; return the error, or nothing."""
    try:
        restore(link, target)
    except ArtifactError as error:
        return str(error)
    return ""


def require_harmless(chain: Path, contents: Mapping[int, Mapping[str, bytes]], target: Path) -> int:
    """Check that each step comes back as it was, or is refused and listed as damaged; return how many are refused.

    A link that lies about its own files is refused when it is restored, which reading it does not tell.
    """
    damaged = {row.name for row in survey(chain) if row.damage}
    for step in STEPS:
        link = chain / f"step-{step}.birdie"
        if refusal := refusal_of(link, target):
            assert "\n" not in refusal
            assert not target.exists()
            assert link.name in damaged or not link.exists() or any(lie in refusal for lie in UNSEEN)
        else:
            assert {file.name: file.read_bytes() for file in target.iterdir()} == contents[step]
            assert link.name not in damaged
            shutil.rmtree(target)
    return len(damaged)


def flip(chain: Path, generator: random.Random) -> None:
    path = generator.choice(sorted(chain.iterdir()))
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def cut(chain: Path, generator: random.Random) -> None:
    path = generator.choice(sorted(chain.iterdir()))
    data = path.read_bytes()
    path.write_bytes(data[: generator.randrange(len(data))] + bytes(generator.randrange(2)))


def swap(chain: Path, generator: random.Random) -> None:
    first, second = generator.sample(sorted(chain.iterdir()), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def remove(chain: Path, generator: random.Random) -> None:
    generator.choice(sorted(chain.iterdir())[:-1]).unlink()


@pytest.mark.parametrize("attack", [flip, cut, remove])
def test_a_damaged_chain_restores_what_was_there_or_nothing(
    attack: Callable[[Path, random.Random], None], built: tuple[Path, dict[int, dict[str, bytes]]], tmp_path: Path
) -> None:
    source, contents = built
    refused = 0
    for seed in range(MUTANTS):
        chain = shutil.copytree(source, tmp_path / f"{seed}.birdie")
        attack(chain, random.Random(seed))
        refused += require_harmless(chain, contents, tmp_path / "target")
    assert refused


def test_swapped_links_are_noticed(built: tuple[Path, dict[int, dict[str, bytes]]], tmp_path: Path) -> None:
    """Whoever swaps two files swaps whole checkpoints: each is restored as the step that it holds, or refused."""
    source, contents = built
    known = [*contents.values()]
    for seed in range(6):
        chain = shutil.copytree(source, tmp_path / f"{seed}.birdie")
        swap(chain, random.Random(seed))
        for link in sorted(chain.iterdir()):
            target = tmp_path / "target"
            if not refusal_of(link, target):
                assert {file.name: file.read_bytes() for file in target.iterdir()} in known
                shutil.rmtree(target)
        assert any(row.damage for row in survey(chain))


def edit(link: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata of a link, as somebody who also writes its checksums."""
    with Reader(link) as reader:
        entries, fields = [reader.read(name) for name in reader.entries], json.loads(bytes(reader.metadata) or b"{}")
    change(fields)
    link.write_bytes(container.to_bytes(entries, json.dumps(fields).encode()))


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(fields: dict[str, Any]) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


FILE = ("link", "files", "model.safetensors")
LIES = {
    "itself": (put("link", "base", value="step-3.birdie"), "does not precede"),
    "a later one": (put("link", "base", value="step-4.birdie"), "does not precede"),
    "another folder": (put("link", "base", value="../run.birdie/step-2.birdie"), "no name of a link beside it"),
    "a folder below": (put("link", "base", value="x/step-2.birdie"), "no name of a link beside it"),
    "an absolute path": (put("link", "base", value="/etc/passwd"), "no name of a link beside it"),
    "another suffix": (put("link", "base", value="step-2"), "no name of a link beside it"),
    "no text": (put("link", "base", value=["step-2.birdie"]), "no name of a link beside it"),
    "none": (put("link", "base", value=""), "names no base"),
    "missing": (put("link", "base", value="step-7.birdie"), "missing"),
    "an earlier one": (put("link", "base", value="step-1.birdie"), "another checkpoint"),
    "digest of the base": (put("link", "digest", value="0" * 64), "another checkpoint"),
    "digest that is none": (put("link", "digest", value="0"), "not what birdie writes"),
    "digest of a file": (put(*FILE, "sha256", value="0" * 64), "does not come back"),
    "size of a file": (put(*FILE, "bytes", value=1 << 50), "do not add up"),
    "gaps": (put(*FILE, "gaps", value=[1 << 40, 1]), "do not add up"),
    "order": (put(*FILE, "order", value=["", [5]]), "no permutation"),
    "order of more": (put(*FILE, "order", value=["", [], [1]]), "more than the file holds"),
    "order of numbers": (put(*FILE, "order", value=[0, 1]), "not what birdie writes"),
    "no gaps": (put(*FILE, "gaps", value=[]), "do not add up"),
    "more gaps than tensors": (put(*FILE, "gaps", value=[0] * 9), "9 tensors"),
    "negative gap": (put(*FILE, "gaps", value=[-1, 1]), "not what birdie writes"),
    "no files": (put("link", "files", value={}), "not what birdie writes"),
    "files that leave the folder": (put("link", "files", value={"../x": {"bytes": 0, "sha256": "0" * 64}}), "not what"),
    "a file that is missing": (put("link", "files", "x", value={"bytes": 9, "sha256": "0" * 64}), "do not add up"),
    "the same file of a base without it": (
        put("link", "files", "x", value={"bytes": 9, "sha256": "0" * 64, "same": True}),
        "lacks it",
    ),
    "name": (put("link", "name", value="../../x"), "not what birdie writes"),
    "step": (put("link", "step", value=-3), "not what birdie writes"),
    "step of the future": (put("link", "step", value=1 << 90), "not what birdie writes"),
    "boolean step": (put("link", "step", value=True), "not what birdie writes"),
    "named by a number": (put("link", "named", value=1), "not what birdie writes"),
    "no object": (put("link", value=3), "not what birdie writes"),
    "a list": (put("link", value=[]), "not what birdie writes"),
    "a name in the base": (
        put("base", "names", value={"model.safetensors/a": "model.safetensors/b"}),
        "give another base",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_link_that_lies_is_refused_in_one_sentence(
    lie: str, chain: Path, built: tuple[Path, dict[int, dict[str, bytes]]], tmp_path: Path
) -> None:
    change, message = LIES[lie]
    edit(chain / "step-3.birdie", change)
    with pytest.raises(ArtifactError, match=message) as error:
        restore(chain / "step-3.birdie", tmp_path / "target")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [chain.name], "nothing is written"
    require_harmless(chain, built[1], tmp_path / "target")


def test_links_in_a_circle_are_refused(chain: Path, tmp_path: Path) -> None:
    edit(chain / "step-2.birdie", put("link", "base", value="step-3.birdie"))
    with pytest.raises(ArtifactError, match="does not precede"):
        restore(chain / "step-3.birdie", tmp_path / "target")
    assert [row.step for row in survey(chain) if row.damage] == [2, 3, 4]


def test_no_link_is_a_difference_to_a_checkpoint_that_is_known_by_its_name(chain: Path, tmp_path: Path) -> None:
    edit(chain / "step-2.birdie", put("link", "named", value=True))
    with pytest.raises(ArtifactError, match="does not precede"):
        restore(chain / "step-3.birdie", tmp_path / "target")
    assert {row.step for row in survey(chain) if row.damage} == {3, 4}
    edit(chain / "step-3.birdie", put("link", "named", value=True))
    edit(chain / "step-3.birdie", put("link", "base", value="step-3.birdie"))
    with pytest.raises(ArtifactError, match="does not precede"):
        restore(chain / "step-3.birdie", tmp_path / "target")


def test_a_base_of_other_shapes_is_refused(chain: Path, tmp_path: Path) -> None:
    """A base with the digest that the link asks for, and other tensors."""
    with Reader(chain / "step-2.birdie") as reader:
        fields = json.loads(bytes(reader.metadata))
    birdie.save({"model.safetensors/a": torch.ones(3, 5), "model.safetensors/b": torch.ones(300)}, chain / "x.birdie")
    (chain / "x.birdie").rename(chain / "step-2.birdie")
    edit(chain / "step-2.birdie", put("link", value=fields["link"]))
    with pytest.raises(ArtifactError, match="give another base"):
        restore(chain / "step-3.birdie", tmp_path / "target")


def test_a_base_with_other_values_is_refused(chain: Path, tmp_path: Path) -> None:
    with Reader(chain / "step-2.birdie") as reader:
        fields = json.loads(bytes(reader.metadata))
    birdie.save(
        {"model.safetensors/a": torch.ones(40, 16), "model.safetensors/b": torch.ones(300).half()},
        chain / "step-2.birdie",
        lossless=True,
    )
    edit(chain / "step-2.birdie", put("link", value=fields["link"]))
    with pytest.raises(ArtifactError, match="other values"):
        birdie.load(chain / "step-3.birdie")
    with pytest.raises(ArtifactError, match="other values"):
        restore(chain / "step-3.birdie", tmp_path / "target")


def test_a_long_chain_takes_the_memory_of_two_checkpoints(tmp_path: Path) -> None:
    """A hundred links, each of which names the one before, are followed without holding them."""
    weight = torch.randn(1 << 14)
    first = links.Link(0, "step-0", True, {"x": links.FileTable(0, "0" * 64, [], ())})
    birdie.save({"x/a": weight}, tmp_path / "step-0.birdie", lossless=True)
    edit(tmp_path / "step-0.birdie", put("link", value=first.to_json()))
    birdie.save({"x/a": weight}, tmp_path / "same.birdie", lossless=True, base={"x/a": weight})
    for step in range(1, 100):
        link = links.Link(step, "step", True, first.files, f"step-{step - 1}.birdie", first.digest)
        shutil.copy(tmp_path / "same.birdie", tmp_path / f"step-{step}.birdie")
        edit(tmp_path / f"step-{step}.birdie", put("link", value=link.to_json()))
    birdie.load(tmp_path / "step-1.birdie")  # imports and compiled code count as memory, too
    tracemalloc.start()
    loaded = birdie.load(tmp_path / "step-99.birdie")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(loaded["x/a"], weight)
    assert peak < 8 * weight.nbytes + (1 << 20)


def test_a_chain_beyond_the_limit_is_refused(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST", 2)
    with pytest.raises(ArtifactError, match="more than 2 deltas"):
        restore(chain / "step-4.birdie", tmp_path / "target")
