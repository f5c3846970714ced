"""A configuration in a file chooses neither code nor the size of what is built."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.cli import main
from birdie.errors import ConfigError
from birdie.hub.untrusted import bounded, harmless
from tests.hub.models import outputs, write

NAMES = [
    *(
        "owner/repo",
        "owner/repo@main:function",
        "kernels-community/flash-attn2",
        "flash_attention_2",
        "paged|owner/repo",
    ),
    *(["eager"], {"text_config": "owner/repo"}, 7, True),
]
KEYS = ["attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=5)
    | st.sampled_from(["eager", "sdpa", *NAMES[:5]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, "auto_map", "text_config", "hidden_size"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def named(config: Any) -> list[Any]:
    """Return the values of all keys that name an implementation."""
    if isinstance(config, list):
        return [value for item in config for value in named(item)]
    if not isinstance(config, dict):
        return []
    values = [value for key, value in config.items() if "implementation" in key or key == "auto_map"]
    return values + [value for item in config.values() for value in named(item)]


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_whatever_is_left_of_a_configuration_names_no_code(config: Any) -> None:
    kept = harmless(config)
    for value in named(kept):
        for name in value.values() if isinstance(value, dict) else [value]:
            assert name in (None, "eager", "sdpa")
    assert harmless(kept) == kept


def hostile(folder: Path, changes: dict[str, Any]) -> tuple[Any, Path]:
    """Return a small model, and a file of it with a changed configuration."""
    model = write("llama", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | changes
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_model(
        model.state_dict(),
        folder / "x.birdie",
        SaveOptions(lossless=True),
        files={"config.json": json.dumps(config).encode()},
    )
    return model, folder / "x.birdie"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_names_no_kernels(key: str, lazy: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    model, file = hostile(tmp_path, {key: "owner/repo"})
    loaded = birdie.from_pretrained(file, lazy=lazy)
    assert loaded.config._attn_implementation in ("eager", "sdpa")
    assert torch.equal(outputs(loaded, "llama"), outputs(model, "llama"))
    assert lazy or f"{key} = " in caplog.text


def test_a_folder_that_is_calibrated_names_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    hostile(tmp_path, {"attn_implementation": "owner/repo", "auto_map": {"AutoModel": "evil.Model"}})
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(tmp_path / "model"), "-o", str(tmp_path / "y.birdie"), "--bits", "6", "--effort", "fast"])
    assert not ended.value.code
    assert "auto_map = " in caplog.text


@pytest.mark.parametrize("layers", [2000, 10**6, 10**12])
def test_a_file_chooses_no_number_of_layers(layers: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, file = hostile(tmp_path, {"num_hidden_layers": layers})
    for lazy in (False, True):
        with pytest.raises(ConfigError, match=r"more than [\d,]+ parameters|more parts than"):
            birdie.from_pretrained(file, lazy=lazy)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(layers)])


def test_building_ends_where_the_tensors_of_a_file_explain_no_more() -> None:
    with bounded(100):
        Deep(600)
    with pytest.raises(ConfigError, match="1,400 parameters, and the file has 100"), bounded(100):
        Deep(10**9)
    with pytest.raises(ConfigError, match="modules"), bounded(1):
        nn.ModuleList(nn.Identity() for _ in range(10**9))
    Deep(2000)  # nothing is left behind


def test_building_has_a_deadline() -> None:
    with pytest.raises(ConfigError, match=r"not built within 0\.2 s"), bounded(1, 0.2):
        sum(1 for _ in itertools.count())
    with bounded(1, 0.05):
        pass
    time.sleep(0.1)  # the deadline of what has ended disturbs nobody
