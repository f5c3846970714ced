"""A pretend accelerator on the CPU: tensors that say `pretend:0`, and errors where a GPU would have them.

Its tensors hold data of the CPU. Operations on tensors of both devices, CPU generators for its tensors, and `.numpy()`
raise, as on CUDA. It renames a backend of torch for the whole process, so use it in a process of its own.
"""

from typing import Any

import torch
import torch._dynamo  # before torch.Generator is replaced
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
CPU = torch.device("cpu")
_aten = torch.ops.aten
_PUTS = (_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default)
_MIXED = (_aten.copy_.default, _aten.index.Tensor, _aten._unsafe_index.Tensor, *_PUTS)  # CUDA allows these
_tensor, _Generator = torch.tensor, torch.Generator
_GENERATORS: list[torch.Generator] = []  # of the device; on the CPU, as its data


class Pretend(Tensor):
    """A tensor on the pretend device; `data_on_cpu` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> "Pretend":
        tensor: Pretend = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        tensor.data_on_cpu = values
        return tensor

    def untyped_storage(self) -> Any:
        return self.data_on_cpu.untyped_storage()

    def data_ptr(self) -> int:
        return self.data_on_cpu.data_ptr()

    def tolist(self) -> Any:
        return self.data_on_cpu.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = Pretend(self.data_on_cpu.detach().clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_on_cpu"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class PretendMode(TorchDispatchMode):
    """Makes factory calls with `device="pretend"` work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    pretended = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    plain = [t for t in tensors if not isinstance(t, Pretend) and t.device.type == "cpu" and t.ndim]
    if pretended and plain and func not in _MIXED:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} has some on the CPU")
    if func in _PUTS and args[2].ndim and isinstance(args[0], Pretend) != isinstance(args[2], Pretend):
        raise RuntimeError("Expected all tensors to be on the same device, but index_put has values elsewhere")
    pretends = _is_there(func, args, kwargs, pretended)
    if func is _aten.index.Tensor and not pretends and pretended:
        raise RuntimeError("indices should be on the CPU, as the indexed tensor is")
    # torch passes generators on as other objects: those of the device are known by their seeds
    seeds = {leaf.initial_seed() for leaf in leaves if isinstance(leaf, _Generator)}
    if pretends and not seeds <= {generator.initial_seed() for generator in _GENERATORS}:
        raise RuntimeError(f"Expected a generator on the device of the tensor, but {func} has one on the CPU")
    on_cpu = tree_map(_on_cpu, args)
    result = func(
        *on_cpu, **{k: CPU if k == "device" and v is not None else tree_map(_on_cpu, v) for k, v in kwargs.items()}
    )
    originals = {id(_on_cpu(tensor)): tensor for tensor in tensors}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in originals:
            return originals.get(id(value), value)
        return Pretend(value) if pretends and not isinstance(value, Pretend) else value

    return tree_map(wrapped, result)


def _is_there(func: Any, args: Any, kwargs: dict[str, Any], pretended: list[Pretend]) -> bool:
    """Return whether the result is on the pretend device."""
    if func in (_aten.copy_.default, _aten.index.Tensor):
        return isinstance(args[0], Pretend)
    device = kwargs.get("device")
    return bool(pretended) if device is None else torch.device(device).type == NAME


def _on_cpu(value: Any) -> Any:
    return value.data_on_cpu if isinstance(value, Pretend) else value


def _new_tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    created = _tensor(data, device="cpu", **options)
    return created if device is None or torch.device(device).type != NAME else created.to(device)


def _new_generator(device: Any = "cpu") -> torch.Generator:
    generator = _Generator("cpu")
    if torch.device(device).type == NAME:
        _GENERATORS.append(generator)
    return generator


def install() -> PretendMode:
    """Register the device in this process; enter the returned mode to use it."""
    _setup_privateuseone_for_python_backend(NAME)
    torch.tensor, torch.Generator = _new_tensor, _new_generator  # type: ignore[assignment,misc]
    backend: Any = getattr(torch, NAME)
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return PretendMode()
