"""Weights that transformers merges, splits and transposes as it loads are calibrated under their names on disk."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.errors import WeightsError
from birdie.hub.data_calibration import next_token_loss
from birdie.hub.names_on_disk import NamesOnDisk
from tests.nightly import mostly_nightly

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}


def write(kind: str, folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | MODELS[kind] | more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return open_checkpoint(folder).content


def load(kind: str, folder: Path) -> Any:
    return getattr(transformers, f"{kind}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (8, 32), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kind", mostly_nightly(MODELS, ("Mixtral",)))
def test_data_reach_each_expert_by_its_names_on_disk(kind: str, tmp_path: Path) -> None:
    state = write(kind, tmp_path)
    module = NamesOnDisk(load(kind, tmp_path), state, tmp_path, use_cache=False)
    assert {name: weight.shape for name, weight in module.state_dict().items()} == {
        name: weight.shape for name, weight in state.items()
    }
    result = CalibrationResult.of(state, (module, batches(4), next_token_loss), symmetries=False)
    experts = {name for name in state if ".experts." in name}
    assert len(experts) == 12 * (1 if kind == "DeepseekV3" else 2)
    assert {name for name, weight in state.items() if is_worth_coarsening(weight)} <= result.sensitivities.keys()
    for name in experts:
        known = result.sensitivities[name]
        assert known.hessian is not None
        assert known.row_fisher is not None
        assert (len(known.row_fisher), len(known.hessian)) == tuple(state[name].shape)
    assert result.held_out is not None
    assert result.held_out(state) == 0
    one = sorted(experts)[0]
    assert result.held_out({one: 0 * state[one]}) > 0  # the values of one expert reach the model
    assert result.held_out(state) == 0


def test_an_expert_without_tokens_is_named(tmp_path: Path) -> None:
    state = write("Mixtral", tmp_path, num_experts_per_tok=1)
    module = NamesOnDisk(load("Mixtral", tmp_path), state, tmp_path, use_cache=False)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    state[router] = torch.stack((state[router][0], -state[router][0], *torch.zeros(2, 32)))  # the first two win
    module.load_state_dict(state)
    result = CalibrationResult.of(state, (module, batches(2), next_token_loss), symmetries=False)
    assert set(result.unreached) >= {name for name in state if re.search(r"layers\.0\..*experts\.[23]\.", name)}
    assert not [name for name in result.unreached if re.search(r"layers\.0\..*experts\.[01]\.", name)]


def test_weights_of_experts_are_written_by_their_names(tmp_path: Path) -> None:
    state = write("Mixtral", tmp_path)
    module = NamesOnDisk(load("Mixtral", tmp_path), state, tmp_path, use_cache=False)
    other = {name: torch.randn_like(weight) for name, weight in state.items()}
    changed = copy.deepcopy(module)
    changed.load_state_dict(other)
    assert all(torch.equal(weight, other[name]) for name, weight in changed.state_dict().items())
    assert all(torch.equal(weight, state[name]) for name, weight in module.state_dict().items())
    with pytest.raises(WeightsError, match="more"):
        changed.load_state_dict(other | {"more": torch.zeros(1)})


@pytest.mark.parametrize("change", ["one expert less", "another expert"])
def test_an_expert_that_is_not_on_disk_is_refused(change: str, tmp_path: Path) -> None:
    state = write("Mixtral", tmp_path)
    model, name = load("Mixtral", tmp_path), "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    if change == "one expert less":
        del state[name]
    else:
        state[name] = state[name] + 1
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        NamesOnDisk(model, state, tmp_path)


def test_rows_that_transformers_reorders_are_written_with_the_next_call() -> None:
    class Reordered(torch.nn.Module):
        """Stands for a model whose rotary rows are permuted as it loads."""

        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(4, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.proj.weight)

    def on_disk(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(2, 2, 2, -1).transpose(1, 2).reshape(weight.shape)

    model = Reordered()
    state = {"wq": on_disk(model.proj.weight.detach())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.core_model_loading.revert_weight_conversion",
            lambda _model, tensors: {"wq": on_disk(tensors["proj.weight"])},
        )
        module = NamesOnDisk(model, state, Path("folder"))
    x, other = torch.randn(3, 4), torch.randn(8, 4)
    copied = copy.deepcopy(module)
    copied.state_dict()["wq"].copy_(other)
    torch.testing.assert_close(on_disk(copied(x).T), torch.nn.functional.linear(x, other).T)
    torch.testing.assert_close(on_disk(module(x).T), torch.nn.functional.linear(x, state["wq"]).T)


def test_one_tensor_on_disk_may_be_several_parameters() -> None:
    class Attention(torch.nn.Module):
        """Stands for a model whose projections are one tensor on disk."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in "qkv")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"qkv.{kind}": torch.cat([tensors[f"{name}.{kind}"] for name in "qkv"]) for kind in ("weight", "bias")}

    model = Attention()
    state = joined(model.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.core_model_loading.revert_weight_conversion", lambda _model, tensors: joined(tensors)
        )
        module = NamesOnDisk(model, state, Path("folder"))
        with pytest.raises(WeightsError, match=r"'q\.weight'"):
            NamesOnDisk(model, {**state, "qkv.weight": state["qkv.weight"] + 1}, Path("folder"))
    x, other = torch.randn(3, 8), {name: torch.randn_like(tensor) for name, tensor in state.items()}
    expected, changed = module(x), copy.deepcopy(module)
    changed.load_state_dict(other)
    assert not torch.allclose(changed(x), expected)
    assert joined(changed.model.state_dict()).keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in joined(changed.model.state_dict()).items())
    assert torch.equal(module(x), expected)
    inputs = [torch.randn(16, 8) for _ in range(4)]
    result = CalibrationResult.of(state, (module, inputs, lambda net, x: net(x).square().sum()), symmetries=False)
    known = result.sensitivities["qkv.weight"]
    assert known.hessian is not None
    assert known.row_fisher is not None
    assert (len(known.hessian), len(known.row_fisher)) == (8, 24)
    assert known.row_fisher.min() > 0
    assert not result.unreached


def test_the_command_calibrates_experts(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.hub.made_up.TOKENS", 640)
    write("Mixtral", tmp_path / "model", num_hidden_layers=1)
    file, back = tmp_path / "m.birdie", tmp_path / "back"
    command = ["compress", str(tmp_path / "model"), "-o", str(file), "--bits", "6", "--effort", "fast", "--json"]
    assert run(build_app, command) == 0
    assert json.loads(capsys.readouterr().out)["calibration"].startswith("calibrated")
    assert run(build_app, ["decompress", str(file), "-o", str(back)]) == 0
    decoded, loaded = birdie.load(file), NamesOnDisk(load("Mixtral", back), birdie.load(file), back).state_dict()
    assert all(torch.equal(loaded[name], decoded[name].float()) for name in decoded)
