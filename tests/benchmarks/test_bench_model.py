"""The shared model is cached by its settings and the contents of its data, and its data files exist."""

from pathlib import Path

import pytest

from benchmarks import bench_model
from birdie.errors import ConfigError


def test_the_digest_depends_on_settings_and_contents_and_not_on_paths(tmp_path: Path) -> None:
    def sources(folder: Path, text: bytes) -> bench_model.Sources:
        folder.mkdir()
        paths = [folder / name for name in ("tokenizer", "train", "val", "book")]
        for path in paths:
            path.write_bytes(text if path.name == "book" else path.name.encode())
        return bench_model.Sources(paths[0], paths[1], paths[2], (paths[3],))

    recipe = bench_model.RECIPE.read_text()
    other, quiet = tmp_path / "other.toml", tmp_path / "quiet.toml"
    other.write_text(recipe.replace("seed = 0", "seed = 1"))
    quiet.write_text("# a comment\n" + recipe.replace("max_tokens = 65536", "max_tokens = 512"))
    one, two, three = (
        sources(tmp_path / name, text) for name, text in (("one", b"text"), ("two", b"text"), ("three", b"texts"))
    )
    digest = bench_model.digest(one)
    assert digest == bench_model.digest(two) == bench_model.digest(one, quiet)
    others = (bench_model.digest(three), bench_model.digest(one, other), bench_model.digest(one, longer=4))
    assert len({digest, *others}) == 4


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIRDIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="BIRDIE_DATA"):
        bench_model.bench_model(tmp_path)
    with pytest.raises(ConfigError, match=r"fineweb_1024_bpe\.model"):
        bench_model.bench_model(tmp_path, tmp_path)


def test_the_sources_of_the_shared_model_exist(shared_data: Path, tmp_path: Path) -> None:
    assert len(bench_model.Sources.under(shared_data).books) == 15
    with pytest.raises(ConfigError, match="no trained model"):
        bench_model.bench_model(tmp_path, shared_data, train=False)
