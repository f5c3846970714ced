"""Transforms: undone to rounding for any shape, norms kept, and in numpy the very same numbers to the last digits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.schemes.rotation import rotate
from birdie.compress.spectral.inverse import KINDS, cosines, invert
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import rows_columns
from birdie.errors import ConfigError

LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 17])
SHAPES = st.lists(LENGTHS, min_size=0, max_size=5).filter(lambda sizes: np.prod(sizes) <= 5_000).map(tuple)
TRANSFORMS = st.builds(
    Transform,
    kind=st.sampled_from(KINDS),
    edge=st.sampled_from([2, 3, 4, 8, 16]),
    levels=st.integers(1, 5),
    axes=st.sampled_from(["all", "kernel"]),
)
SOME = [
    *(Transform(kind) for kind in KINDS),
    *(Transform("dct", edge=3), Transform("dct", edge=16), Transform("dct", axes="kernel")),
    *(Transform("wavelet53", levels=9), Transform("wavelet97", levels=1, axes="kernel")),
]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25)
@given(transform=TRANSFORMS, shape=SHAPES, seed=st.integers(0, 99), content=st.sampled_from(["noise", "ones", "zeros"]))
def test_the_inverse_undoes_and_both_decoders_agree(
    transform: Transform, shape: tuple[int, ...], seed: int, content: str
) -> None:
    weight = {"noise": noise(*shape, seed=seed), "ones": torch.ones(shape), "zeros": torch.zeros(shape)}[content]
    weight = weight.double()
    coefficients = transform.forward(weight)
    assert coefficients.shape == weight.shape
    torch.testing.assert_close(transform.inverse(coefficients), weight, rtol=0, atol=1e-12)
    decoded = coefficients.numpy().copy()
    invert(transform.plan, decoded)
    np.testing.assert_allclose(decoded, weight.numpy(), rtol=0, atol=1e-12)
    single = transform.forward(weight.float())
    assert single.dtype is torch.float32
    rounding = 2e-6 * max(10.0, float(coefficients.abs().max()))  # sums of float32 that cancel
    torch.testing.assert_close(single.double(), coefficients, rtol=2e-6, atol=rounding)


@pytest.mark.parametrize("shape", [(300, 5), (5, 300), (2, 700, 3), (4, 4, 4, 257)])
@pytest.mark.parametrize("transform", SOME)
def test_long_axes_are_undone_alike(transform: Transform, shape: tuple[int, ...]) -> None:
    """Long wavelets are lifted instead of multiplied, and Hadamard matrices have several factors."""
    weight = noise(*shape)
    coefficients = transform.forward(weight)
    torch.testing.assert_close(transform.inverse(coefficients), weight, rtol=0, atol=1e-11)
    decoded = coefficients.numpy().copy()
    invert(transform.plan, decoded)
    np.testing.assert_allclose(decoded, weight.numpy(), rtol=0, atol=1e-11)


@settings(max_examples=25)
@given(shape=SHAPES, kind=st.sampled_from(["dct", "hadamard"]), edge=st.integers(2, 20))
def test_rotations_keep_lengths(shape: tuple[int, ...], kind: str, edge: int) -> None:
    weight = noise(*shape)
    coefficients = Transform(kind, edge).forward(weight)
    torch.testing.assert_close(coefficients.square().sum(), weight.square().sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 64])
def test_the_basis_is_the_cosines(size: int) -> None:
    k, i = np.arange(size)[:, None], np.arange(size)
    scale = np.where(k == 0, 1.0, 2.0**0.5) / size**0.5
    np.testing.assert_allclose(cosines(size), scale * np.cos(np.pi * k * (2 * i + 1) / (2 * size)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("transform", SOME)
def test_gradients(transform: Transform) -> None:
    for shape in ((3, 5), (2, 1, 3, 3)):
        weight = noise(*shape).requires_grad_()
        assert torch.autograd.gradcheck(transform.inverse, (weight,))
        assert torch.autograd.gradcheck(transform.forward, (weight,))


def test_hadamard_is_the_rotation_of_files() -> None:
    for shape in ((3, 16), (4, 130), (7,), (2, 5, 3)):
        weight = noise(*shape)
        columns = weight.numpy().reshape(rows_columns(shape)).T.copy()
        rotate(columns, 0, back=False)
        coefficients = Transform("hadamard").forward(weight).numpy().reshape(rows_columns(shape))
        np.testing.assert_allclose(coefficients, columns.T, rtol=0, atol=1e-12)


def test_kernels_alone_leave_channels_be() -> None:
    weight = noise(4, 5, 3, 3)
    coefficients = Transform(axes="kernel").forward(weight)
    torch.testing.assert_close(coefficients[2, 3], Transform().forward(weight[2, 3]))
    flat = noise(6, 7)
    assert torch.equal(Transform(axes="kernel").forward(flat), flat)
    assert [int(classes.max()) for classes in Transform(axes="kernel").classes((4, 5, 3, 3))] == [0, 0, 2, 2]


def test_autocast_does_not_round_weights() -> None:
    weight = noise(16, 24).float()
    plain = Transform().forward(weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Transform().forward(weight), plain)


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"kind": "haar"}, "haar"), ({"edge": 1}, "edge=1"), ({"levels": 0}, "levels=0"), ({"axes": "rows"}, "rows")],
)
def test_wrong_settings_are_refused_in_words(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Transform(**settings)  # type: ignore[arg-type]


OTHERS = [
    pytest.param(transform, marks=pytest.mark.nightly)
    for transform in (Transform("wavelet53", levels=2), Transform("hadamard"))
]


@pytest.mark.nightly
@pytest.mark.parametrize("transform", [Transform(edge=11), *OTHERS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_makes_one_graph(transform: Transform) -> None:
    """Once the transform has been used forward, as it is on any weight that is compressed."""
    weight = noise(13, 23)
    coefficients = transform.forward(weight).requires_grad_()
    compiled = torch.compile(transform.inverse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(coefficients), weight)
    torch.autograd.backward(compiled(coefficients).square().sum())
    assert coefficients.grad is not None
