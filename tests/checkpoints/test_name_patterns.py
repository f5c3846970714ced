"""Patterns of names choose tensors: every tensor is taken or counted, and a pattern without a match is an error."""

from pathlib import Path

import pytest
import torch
from torch import nn

from birdie.checkpoints import NamePatterns, open_checkpoint
from birdie.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the checkpoint of two networks in one state dict."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            "ema_encoder": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        }
    )
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        (NamePatterns(["encoder.*"]), 7),
        (NamePatterns(exclude=["*.num_batches_tracked"]), 12),
        (NamePatterns(["encoder.*"], ["*.num_batches_tracked", "*.bias"]), 4),
        (NamePatterns(["*.bias", "encoder.0.weight"]), 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("complete", [False, True], ids=["lossy", "lossless"])
def test_what_matches_is_taken_and_all_else_is_counted(
    patterns: NamePatterns, taken: int, complete: bool, path: Path
) -> None:
    everything = open_checkpoint(path).content
    checkpoint = open_checkpoint(path, patterns=patterns, complete=complete)
    assert len(checkpoint.content) == taken
    left = {name: tensor.nbytes for name, tensor in everything.items() if name not in checkpoint.content}
    assert {f"state_dict/{name}": size for name, size in left.items()}.items() <= checkpoint.dropped.items()
    assert f"{len(left)} of 14 tensors, {sum(left.values()):,} B" in " ".join(checkpoint.notes)
    assert checkpoint.input_bytes == sum(tensor.nbytes for tensor in checkpoint.content.values())


def test_names_are_those_after_a_key(path: Path) -> None:
    checkpoint = open_checkpoint(path, keys=["state_dict.encoder."], patterns=NamePatterns(["0.*"]))
    assert [*checkpoint.content] == ["0.weight", "0.bias"]
    assert [*checkpoint.others] == ["state_dict.ema_encoder."]


def test_copies_of_which_one_is_left_out_are_no_copies(path: Path) -> None:
    assert any("two copies" in note for note in open_checkpoint(path).notes)
    checkpoint = open_checkpoint(path, patterns=NamePatterns(exclude=["ema_*"]))
    assert not any("two copies" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (NamePatterns(["encodr.0.weight"]), "near it: .*encoder.0.weight"),
        (NamePatterns(exclude=["decoder.*"]), "--exclude 'decoder"),
        (NamePatterns(["*.bias"], ["*"]), "nothing of"),
    ],
    ids=str,
)
def test_a_pattern_that_chooses_nothing_is_an_error(patterns: NamePatterns, words: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(path, patterns=patterns)


def test_a_folder_is_taken_complete(path: Path) -> None:
    with pytest.raises(ConfigError, match="--include and --exclude"):
        open_checkpoint(path.parent, patterns=NamePatterns(["*"]))
