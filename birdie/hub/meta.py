"""Modules whose parameters take no memory while they are built."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on the meta device, one of which is in memory at a time; buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield
