"""A folder of timm gives back its model, with the outputs of the decoded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.cli import build_app
from birdie.cli.console import run

try:  # timm imports torchvision, which raises a RuntimeError where its build is not that of torch
    import timm
    from timm.models._hub import save_for_hf
except (ImportError, RuntimeError) as error:
    pytest.skip(f"timm cannot be imported ({error})", allow_module_level=True)

MODELS: dict[str, dict[str, Any]] = {
    "resnet10t": {"num_classes": 10},
    "vit_tiny_patch16_224": {"num_classes": 7, "img_size": 64, "depth": 2},
    "mobilenetv3_small_050": {"num_classes": 5, "in_chans": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_back_its_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = MODELS[name]
    model = timm.create_model(name, **settings).eval()
    kept = {key: value for key, value in settings.items() if key != "num_classes"}
    save_for_hf(model, tmp_path / "folder", model_args=kept, safe_serialization="both")
    file = tmp_path / "model.birdie"
    arguments = ["compress", str(tmp_path / "folder"), "-o", str(file), "--scheme", "int5", "--calibrate", "none"]
    assert run(build_app, arguments) == 0
    model.load_state_dict(birdie.load(file))
    images = torch.randn(2, settings.get("in_chans", 3), 64, 64)
    with torch.no_grad():
        assert torch.equal(birdie.from_pretrained(file)(images), model(images))
