"""Modules whose parameters take no memory while they are built."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def parameters_on_meta(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build modules with parameters on the meta device, one of which is in memory at a time; buffers are real.

    Args:
        dtype: of parameters for which the module names none.
    """
    register, default = nn.Module.register_parameter, torch.get_default_dtype()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.set_default_dtype(dtype or default)
    try:
        with patch.object(nn.Module, "register_parameter", register_on_meta):
            yield
    finally:
        torch.set_default_dtype(default)
