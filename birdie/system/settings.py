"""Settings and random generators of the process, which code of a caller may change: put back afterwards."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DEVICES = ("cpu", "cuda")


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast() -> tuple[Any, ...]:
    modes = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)
    return torch.is_autocast_cache_enabled(), *modes


def _set_autocast(state: tuple[Any, ...]) -> None:
    torch.set_autocast_cache_enabled(state[0])
    for device, (enabled, dtype) in zip(_DEVICES, state[1:], strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _cudnn() -> tuple[bool, ...]:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic


def _set_cudnn(state: tuple[bool, ...]) -> None:
    flags = torch.backends.cudnn
    flags.enabled, flags.benchmark, flags.deterministic = state


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
    (_autocast, _set_autocast),
    (_cudnn, _set_cudnn),
    (np.geterr, lambda state: np.seterr(**state)),
)


@contextmanager
def kept_settings() -> Iterator[Callable[[], None]]:
    """Put the settings and random generators of torch, NumPy and Python back when the context ends.

    Yields:
        a function that puts the settings back now, but not the generators.
    """
    states = [(current, change, current()) for current, change in _SETTINGS]
    cuda = torch.cuda.get_rng_state_all() if _has_cuda() else []
    numbers = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def put_back() -> None:
        for current, change, value in states:
            if current() != value:
                change(value)

    with warnings.catch_warnings():
        try:
            yield put_back
        finally:
            put_back()
            torch.set_rng_state(numbers[0])
            np.random.set_state(numbers[1])
            random.setstate(numbers[2])
            if cuda:
                torch.cuda.set_rng_state_all(cuda)


def seed(number: int) -> None:
    """Seed the random generators of torch, NumPy and Python."""
    # torch.manual_seed formats the stack for every kind of device that is not used yet: a millisecond each
    torch.default_generator.manual_seed(number)
    if _has_cuda():
        torch.cuda.manual_seed_all(number)
    np.random.seed(number)
    random.seed(number)
