"""The dict of weights that is meant is found in checkpoints of every layout, or named; what is beside it is listed."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from birdie.checkpoints.checkpoints import read_weights
from birdie.checkpoints.layouts import choose
from birdie.checkpoints.nested import holds_matrices, tensor_bytes
from birdie.cli import main
from birdie.errors import WeightsError


def network(seed: int, width: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).state_dict()


def optimizer() -> dict[str, Any]:
    parameter = nn.Parameter(torch.ones(5, 5))
    step = torch.optim.Adam([parameter])
    parameter.sum().backward()
    step.step()
    return step.state_dict()


def copied(state: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A copy of a network, some steps of training apart."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


ONE, TWO, WIDE = network(1), network(2), network(3, 7)
BOTH = prefixed("generator", ONE) | prefixed("discriminator", TWO)
LAYOUTS: dict[str, tuple[Any, dict[str, Tensor], tuple[str, ...], set[str]]] = {
    # content; weights; taken; others
    "super-resolution": ({"params": ONE, "params_ema": TWO}, TWO, ("params_ema",), {"params"}),
    "detector": ({"model": ONE, "optimizer": optimizer(), "epoch": 9}, ONE, ("model",), set()),
    "detector with an average": (
        {"model": ONE, "ema_state_dict": TWO, "optimizer": optimizer()}, ONE, ("model",), {"ema_state_dict"}
    ),
    "average in a dict": ({"model": ONE, "ema": {"decay": 0.9, "shadow": TWO}}, ONE, ("model",), {"ema"}),
    "average alone": ({"ema": {"decay": 0.9, "shadow": TWO}, "step": 3}, TWO, ("ema.shadow",), set()),
    "diffusion": ({"unet": ONE, "unet_ema": TWO, "opt": optimizer()}, ONE, ("unet",), {"unet_ema"}),
    "Lightning": (
        {"state_dict": prefixed("model", ONE), "optimizer_states": [optimizer()], "lr_schedulers": [],
         "callbacks": {"best": {"score": torch.tensor(0.5)}}, "hyper_parameters": {"weight": torch.ones(3)}},
        prefixed("model", ONE), ("state_dict",), {"callbacks", "hyper_parameters"},
    ),
    "timm": ({"arch": "x", "state_dict": ONE, "state_dict_ema": TWO}, ONE, ("state_dict",), {"state_dict_ema"}),
    "DataParallel": ({"state_dict": prefixed("module", ONE)}, ONE, ("state_dict",), set()),
    "fairseq": ({"model": ONE, "cfg": {"lr": 1}, "last_optimizer_state": optimizer()}, ONE, ("model",), set()),
    "GAN": ({"generator": ONE, "discriminator": TWO, "iter": 3}, BOTH, ("generator", "discriminator"), set()),
    "GAN with wrappers": (
        {"generator": {"state_dict": prefixed("module", ONE)}, "discriminator": prefixed("module", TWO)},
        BOTH, ("generator.state_dict", "discriminator"), set(),
    ),
    "vocoder": ({"generator": ONE, "steps": 5}, ONE, ("generator",), set()),
    "agent": (
        {"policy": ONE, "value": WIDE, "value_target": network(4, 7), "rng": torch.ones(9, dtype=torch.uint8)},
        prefixed("policy", ONE) | prefixed("value", WIDE), ("policy", "value"), {"value_target"},
    ),
    "agent with statistics": (
        {"policy": ONE, "observations": {"mean": torch.ones(4)}}, ONE, ("policy",), {"observations"}
    ),
    "encoder and decoder": (
        {"model": {"encoder": ONE, "decoder": TWO}}, prefixed("encoder", ONE) | prefixed("decoder", TWO), ("model",),
        set(),
    ),
    "nested layers": (
        {"model": {"embed": {"weight": ONE["0.weight"]}, "norm": {"scale": ONE["0.bias"]}}},
        {"embed.weight": ONE["0.weight"], "norm.scale": ONE["0.bias"]}, ("model",), set(),
    ),
    "nested layers without a key": (
        {"embed": {"weight": ONE["0.weight"]}, "norm": {"scale": ONE["0.bias"]}},
        {"embed.weight": ONE["0.weight"], "norm.scale": ONE["0.bias"]}, (), set(),
    ),
    "deep": ({"model": {"language_model": {"layers": ONE}}, "it": 5}, ONE, ("model.language_model.layers",), set()),
    "list": ([ONE, {"epoch": 1}], ONE, ("0",), set()),
    "average in a list": (
        {"net": ONE, "ema": {"decay": 0.9, "shadow_params": [*TWO.values()]}}, ONE, ("net",), {"ema"}
    ),
    "average in a list alone": (
        {"decay": 0.9, "shadow_params": [*TWO.values()] * 3, "collected_params": None},
        {f"{number:02}": tensor for number, tensor in enumerate([*TWO.values()] * 3)}, ("shadow_params",), set(),
    ),
    "layers with numbers": ({0: ONE["0.weight"], 1: ONE["0.bias"]}, {"0": ONE["0.weight"], "1": ONE["0.bias"]}, (),
        set()),
    "experts with numbers": (
        {"experts": {3: ONE, 12: WIDE}}, prefixed("3", ONE) | prefixed("12", WIDE), ("experts.3", "experts.12"), set()
    ),
    "vectors of words": ((["a", "b"], {"a": 0, "b": 1}, ONE["0.weight"], 3), {"2": ONE["0.weight"]}, (), set()),
    "class weights": ({"model": ONE, "loss": {"weight": torch.ones(9)}}, ONE, ("model",), {"loss"}),
    "normalizer": ({"state_dict": ONE, "mean": torch.tensor(1.0)}, ONE, ("state_dict",), set()),
    "flat": (ONE, ONE, (), set()),
    "flat with numbers": (OrderedDict(**ONE, epoch=3, accuracy=0.9, bias=None), ONE, (), set()),
}  # fmt: skip


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_layouts_are_understood(layout: str, tmp_path: Path) -> None:
    content, weights, taken, others = LAYOUTS[layout]
    torch.save(content, tmp_path / "x")
    choice = read_weights(tmp_path / "x")
    assert same(choice.state, weights)
    assert sorted(choice.taken) == sorted(taken)
    assert choice.others.keys() == others
    assert {other.replace(".", "/") for other in others} <= choice.dropped.keys()


@pytest.mark.parametrize("names", [("student", "teacher"), ("a.b", "c"), ("first", "second", "third")])
def test_a_real_choice_is_an_error_that_lists_the_keys_with_their_sizes(names: tuple[str, ...], tmp_path: Path) -> None:
    copies = {name: copied(ONE, seed) for seed, name in enumerate(names)}
    torch.save({"epoch": 2, **copies}, tmp_path / "x")
    with pytest.raises(WeightsError, match="several dicts of tensors") as refused:
        read_weights(tmp_path / "x")
    for name in names:
        assert f"{name} 92 B" in str(refused.value)
        choice = read_weights(tmp_path / "x", keys=[name])
        assert same(choice.state, copies[name])
        assert choice.taken == (name,)
        assert choice.others == dict.fromkeys(set(names) - {name}, 92)


@pytest.mark.parametrize("names", [("left", "right"), ("a.b", "c"), ("q1", "q2", "q3"), ("encoder", "decoder")])
def test_networks_of_the_same_shapes_that_have_nothing_in_common_are_parts_of_one(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    parts = {name: network(seed) for seed, name in enumerate(names)}
    torch.save({"epoch": 2, **parts}, tmp_path / "x")
    choice = read_weights(tmp_path / "x")
    assert choice.taken == names
    assert same(choice.state, {f"{name}.{key}": part[key] for name, part in parts.items() for key in part})


def without_buffers() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return dict(module.state_dict()), {name: tensor / 2 for name, tensor in module.named_parameters()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ONE, copied(ONE)),
        (prefixed("module", ONE), copied(ONE)),
        (prefixed("module._orig_mod", ONE), copied(ONE)),
        without_buffers(),
    ],
    ids=["plain", "wrapped", "compiled and wrapped", "without buffers"],
)
@pytest.mark.parametrize("in_list", [False, True])
def test_two_copies_of_a_network_are_a_choice_whatever_wraps_one(
    one: dict[str, Tensor], other: dict[str, Tensor], in_list: bool, tmp_path: Path
) -> None:
    torch.save([one, optimizer(), 4, other] if in_list else {"x": one, "y": other}, tmp_path / "x")
    with pytest.raises(WeightsError, match="several dicts of tensors"):
        read_weights(tmp_path / "x")
    assert same(read_weights(tmp_path / "x", keys=["3" if in_list else "y"]).state, other)


@pytest.mark.parametrize("key", ["none", "model.none", "optimizer", "epoch", "", "model."])
def test_a_key_without_tensors_is_an_error_that_lists_those_with_some(key: str, tmp_path: Path) -> None:
    torch.save({"model": {"a": ONE, "b": TWO}, "optimizer": optimizer(), "epoch": 3}, tmp_path / "x")
    with pytest.raises(WeightsError, match=r"it has model\.b 92 B, model\.a 92 B"):
        read_weights(tmp_path / "x", keys=[key])


def test_a_key_of_names_without_its_dot_is_an_error_that_has_it(tmp_path: Path) -> None:
    torch.save({"state_dict": prefixed("net", ONE) | prefixed("ema", copied(ONE))}, tmp_path / "x")
    with pytest.raises(WeightsError, match=r"names that begin so: --key state_dict\.ema\.$"):
        read_weights(tmp_path / "x", keys=["state_dict.ema"])
    assert same(read_weights(tmp_path / "x", keys=["state_dict/ema."]).state, copied(ONE))


def test_what_is_no_network_can_be_kept_whole(tmp_path: Path) -> None:
    for content in (optimizer(), [torch.ones(9)], torch.ones(3, 3)):
        torch.save(content, tmp_path / "x")
        with pytest.raises(WeightsError, match="--lossless"):
            read_weights(tmp_path / "x")
        assert run("compress", tmp_path / "x", "-o", tmp_path / "x.birdie", "--lossless", "--effort", "fast") == 0
    torch.save({"state_dict": {}}, tmp_path / "x")
    with pytest.raises(WeightsError, match="no dict of tensors") as refused:
        read_weights(tmp_path / "x")
    assert "--lossless" not in str(refused.value)


def test_hostile_nesting_ends(tmp_path: Path) -> None:
    deep: dict[str, Any] = dict(ONE)
    for _ in range(100):
        deep = {"a": deep}
    circle: list[Any] = [{"w": ONE}]
    circle.append(circle)
    wide: Any = ONE
    for _ in range(30):
        wide = [wide, wide]
    for content in (deep, circle, wide):
        torch.save({"model": TWO, "x": content}, tmp_path / "x")
        assert same(read_weights(tmp_path / "x").state, TWO)
    torch.save({"a": {"b.c": ONE["0.weight"]}, "a.b": {"c": ONE["0.bias"], "d.e": ONE["0.weight"]}}, tmp_path / "x")
    with pytest.raises(WeightsError, match=r"two tensors named 'a\.b\.c'"):
        read_weights(tmp_path / "x")


def objects(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested dicts and lists of tensors of few shapes, so that some are alike."""
    shapes = st.tuples(st.sampled_from([(), (3,), (3, 4), (4, 4)]), st.integers(0, 3))
    tensors = shapes.map(lambda one: torch.randn(one[0], generator=torch.Generator().manual_seed(one[1])))
    leaves = st.one_of(tensors, st.sampled_from([3, None, "x"]))
    return st.recursive(
        st.dictionaries(keys, leaves, min_size=1, max_size=3),
        lambda inner: st.one_of(
            st.dictionaries(keys, st.one_of(inner, leaves), max_size=4), st.lists(inner, max_size=3)
        ),
        max_leaves=8,
    )


@settings(max_examples=80, deadline=None)
@given(objects(st.one_of(st.sampled_from(["model", "ema", "net", "net.w", "net.b", "ema.w", "x"]), st.integers(0, 3))))
def test_every_byte_is_taken_or_named_and_every_other_dict_can_be_named(content: Any) -> None:
    try:
        choice = choose(content, Path("x.pt"))
    except WeightsError:  # in a sentence
        return
    assert tensor_bytes(choice.state) + sum(choice.dropped.values()) == tensor_bytes(content)
    assert max(tensor.ndim for tensor in choice.state.values()) > 1 or not holds_matrices(content)
    for key in choice.others:
        other = choose(content, Path("x.pt"), [key])
        assert tensor_bytes(other.state) + sum(other.dropped.values()) == tensor_bytes(content)


def run(*tokens: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in tokens])
    return int(ended.value.code or 0)


def test_a_part_of_a_state_dict_has_the_versions_of_its_modules(tmp_path: Path) -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    torch.save(module.state_dict(), tmp_path / "x")
    part = read_weights(tmp_path / "x", keys=["net."]).state
    assert vars(part)["_metadata"] == vars(module.net.state_dict())["_metadata"]
