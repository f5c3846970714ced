"""The tensors of a model and of Muon are on the device of their inputs, as the meta device shows without values."""

import pytest
import torch

from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.train.optimizers import Optimizers
from birdie.system.distributed import World

META = torch.device("meta")


@pytest.mark.parametrize("recipe", ["baseline", "sota"])
def test_no_tensor_is_created_elsewhere(recipe: str) -> None:
    settings = find(recipe).recipe("smoke")
    model = GPT(settings.model).to(META)
    model.compute_dtype = torch.bfloat16
    ids = torch.zeros(2, 64, dtype=torch.int64, device=META)
    loss = model.loss(ids, ids)
    torch.autograd.backward(loss)
    assert loss.device == META
    optimizers = Optimizers(model, settings.optimizer, newton_schulz_dtype=torch.bfloat16, world=World())
    assert optimizers.muon is not None
    optimizers.muon.start()
    optimizers.muon.begin()
    optimizers.muon.finish()  # fused AdamW refuses the meta device
    model.eval()
    with torch.no_grad():
        assert model.loss(ids, ids, "none").device == META
