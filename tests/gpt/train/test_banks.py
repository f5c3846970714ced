"""A bank changes the storage of matrices and nothing else: names, arithmetic and state dict stay those of the model."""

import copy

import pytest
import torch
from torch import nn

from birdie.gpt.train.banks import make_banks
from birdie.gpt.train.muon import Muon
from birdie.gpt.train.optimizers import split_parameters
from tests.tiny_run import LENGTH, OPTIMIZERS, VOCAB, TinyBatches, tiny_model, tiny_settings, tiny_training


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return split_parameters(model)["matrices"]


def ids() -> torch.Tensor:
    return torch.arange(4 * LENGTH).view(4, LENGTH) % VOCAB


def test_every_matrix_is_a_slice_of_one_bank() -> None:
    model = tiny_model()
    initial = {name: p.detach().clone() for name, p in matrices(model).items()}
    banks = make_banks(matrices(model))
    assert sorted(name for bank in banks for name in bank.names) == sorted(initial)
    for bank in banks:
        for name, part in bank.split(bank.parameter):
            assert matrices(model)[name].data_ptr() == part.data_ptr()
            assert torch.equal(part, initial[name])


def test_names_state_dict_and_function_are_those_of_the_model_without_banks() -> None:
    plain, model = tiny_model(), tiny_model()
    make_banks(matrices(model))
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(plain(ids()), model(ids()))


def test_gradients_arrive_in_the_bank() -> None:
    plain, model = tiny_model(), tiny_model()
    banks = make_banks(matrices(model))
    for gpt in (plain, model):
        for _ in range(2):  # the second pass adds to the first
            gpt.loss(ids(), ids().roll(1)).backward()
    for bank in banks:
        for name, gradient in bank.split(bank.gradient):
            expected = matrices(plain)[name].grad
            assert expected is not None
            assert torch.equal(gradient, expected)
        bank.zero_grad()
        assert not bank.gradient.any()


def test_gradients_that_a_caller_dropped_are_restored() -> None:
    """`zero_grad(set_to_none=True)` of a module drops the views; autograd then creates new tensors."""
    model = tiny_model()
    banks = make_banks(matrices(model))
    model.loss(ids(), ids().roll(1)).backward()
    expected = [bank.gradient.clone() for bank in banks]
    model.zero_grad(set_to_none=True)
    model.loss(ids(), ids().roll(1)).backward()
    assert all(torch.equal(bank.gradient, old) for bank, old in zip(banks, expected, strict=True))
    model.zero_grad(set_to_none=True)
    assert not any(bank.gradient.any() for bank in banks)


def test_an_update_of_the_bank_is_an_update_of_the_model() -> None:
    model = tiny_model()
    bank = make_banks(matrices(model))[0]
    with torch.no_grad():
        bank.parameter.fill_(3.0)
    assert all(bool((matrices(model)[name] == 3.0).all()) for name in bank.names)


def test_training_with_banks_equals_training_without() -> None:
    """The loop of `fit` against a plain loop on the matrices without banks: all losses within 1e-5."""
    settings = tiny_settings(iterations=6, warmdown_iters=0)
    curve = [step.loss for step in tiny_training(tiny_model(), TinyBatches(), settings)]
    model, batches = tiny_model(), TinyBatches()
    groups = split_parameters(model)
    muon = Muon(groups["matrices"].values(), OPTIMIZERS.matrix_lr)
    adam = torch.optim.Adam(
        [
            {"params": list(groups["embedding"].values()), "lr": OPTIMIZERS.tied_embed_lr},
            {"params": list(groups["scalars"].values()), "lr": OPTIMIZERS.scalar_lr},
        ],
        betas=(OPTIMIZERS.beta1, OPTIMIZERS.beta2),
        eps=OPTIMIZERS.adam_eps,
    )
    plain = []
    for step in range(6):
        model.zero_grad()
        losses = [model.loss(*batches.next()) / settings.accumulation for _ in range(settings.accumulation)]
        for loss in losses:
            loss.backward()
        plain.append(sum(loss.item() for loss in losses))
        progress = min(1.0, step / OPTIMIZERS.muon_momentum_warmup_steps)
        first, last = OPTIMIZERS.muon_momentum_warmup_start, OPTIMIZERS.muon_momentum
        muon.param_groups[0]["momentum"] = (1 - progress) * first + progress * last
        muon.step()
        adam.step()
    assert curve[0] == pytest.approx(plain[0], abs=1e-6)
    assert curve == pytest.approx(plain, abs=1e-5)


def test_a_copy_of_a_model_with_banks_is_independent() -> None:
    model = tiny_model()
    bank = make_banks(matrices(model))[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        bank.parameter.zero_()
    assert any(bool(matrices(other)[name].any()) for name in bank.names)
