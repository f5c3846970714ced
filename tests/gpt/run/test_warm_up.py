"""After `birdie kernels` nothing is compiled: the kernels compiled ahead are those that files of every kind call."""

from importlib import import_module
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import sys, tempfile
from pathlib import Path
from numba.core.dispatcher import Dispatcher
import torch
import birdie
from birdie.artifact.container import Reader
from birdie.entropy import coder
from birdie.gpt.run.warm_up import compile_kernels
from tests.artifact.states import every_dtype, small_model
from tests.reference.streams import FEATURES, stream

def signatures():
    return {
        (name, str(signature))
        for module in [name for name in sys.modules if name.startswith("birdie.")]
        for name, kernel in vars(sys.modules[module]).items()
        if isinstance(kernel, Dispatcher) and kernel.py_func.__module__ == module
        for signature in kernel.signatures
    }

compile_kernels()
known = signatures()
path = Path(tempfile.mkdtemp()) / "model.birdie"
for name, feature in FEATURES.items():
    coded = stream(name)
    coder.decode(coded.coder, coded.payload, *feature.values.shape, hints=feature.hints)
for effort in ("max", "fast"):
    settings = [{"bits": bits} for bits in (2, 3, 5)]
    settings += [{"scheme": scheme} for scheme in ("int4", "ternary", "codebook:k=9", "trellis:states=8,sigma=0.4")]
    for setting in settings:
        birdie.save(small_model(), path, coder=effort, **setting)
        birdie.load(path)
    birdie.save(every_dtype(), path, lossless=True, coder=effort)
    birdie.load(path)
large = torch.randn(1024, 96)  # enough for tiles, of which weights are written at once
state = {str(dtype): large.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
for scheme in ("int4", "int4:group_size=32", "ternary", "trellis:states=8,sigma=0.4", "codebook:k=9", "lossless"):
    birdie.save({**state, "whole": (9 * large).to(torch.int8)}, path, scheme=[("*", scheme)], coder="fast")
    with Reader(path.read_bytes()) as reader:
        assert any(stream.coder == coder.TILES for name in reader.names for stream in reader.read(name).streams), scheme
    birdie.load(path)
print(len(known), sorted(signatures() - known))
"""
FOLDERS = ("entropy", "compress", "compress/schemes", "compress/spectral", "score")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)  # where no kernel is kept yet, all of them are compiled: a minute or two of a core
def test_files_of_every_kind_need_no_other_kernel() -> None:
    done = run_python("-c", PROBE, folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    count, _, others = done.stdout.partition(" ")
    assert int(count) > 50
    assert others == "[]\n"


def test_a_kernel_calls_kernels_of_its_own_folder_only() -> None:
    """A kept kernel contains those that it calls, and is dropped when a module of its folder changes."""
    kernels = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / "birdie" / folder).glob("*.py")):
        if "njit" not in path.read_text(encoding="utf-8"):
            continue
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for kernel in vars(module).values():
            if isinstance(kernel, Dispatcher) and kernel.py_func.__module__ == module.__name__:
                kernels += 1
                called = [kernel.py_func.__globals__.get(name) for name in kernel.py_func.__code__.co_names]
                folders = {
                    Path(other.py_func.__code__.co_filename).parent for other in called if isinstance(other, Dispatcher)
                }
                assert folders <= {path.parent}, kernel
    assert kernels > 50
