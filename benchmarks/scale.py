"""Speed, memory and bytes of compression from millions to a billion weights: `python -m benchmarks.scale`.

    python -m benchmarks.scale                             10, 50 and 200 million weights, four bits each
    python -m benchmarks.scale --weights 10M,1B --json     other sizes
    python -m benchmarks.scale --methods "birdie fast"     some methods

ZipNN, torch_ans and EntroPack run in the environment that `make rivals` builds. EntroPack without a GPU takes two
seconds for a million weights, so it is measured up to 50 million. torch_ans codes a grid with a scale for each row.

Models have the matrices of a Llama-like transformer in bfloat16. Rows and tails are drawn from a trained model of the
shared data (BIRDIE_DATA), else from a log-normal distribution and Student's t. Every measurement is a process of its
own on one thread, with kernels warm: processor seconds of compressing and of loading, and the most memory above that of
a process that has done the same for a small model. The error is ‖decoded − weights‖ / ‖weights‖ over all matrices.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, one_of, report, shared_data
from benchmarks.processes import ROOT
from benchmarks.rivals import RIVALS
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.errors import ConfigError

SIZES = {
    "1M": (1, 256, 1024),
    "10M": (3, 512, 2048),
    "50M": (6, 768, 16_384),
    "200M": (15, 1024, 32_000),
    "1B": (21, 2048, 32_000),
}
"""Layers, width and vocabulary of a model of about so many weights."""
SOURCE = "weights/parameter_golf/nolanvild_128d_fp32.pt"
OURS = ("birdie fast", "birdie max", "birdie lossless")
APART = ("zipnn", "torch_ans", "entropack")  # in an environment of their own
METHODS = (*OURS, "gguf Q4_0", "torchao int4", "zstd -19", "zipnn", "torch_ans", "entropack")
MOST = {"zstd -19": 60_000_000, "entropack": 60_000_000}  # weights: they take a second or two for a million

# Arguments: method, small model, model, file, bits.
_WORKER = """
import json, os, resource, sys, time
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)
method, small, model, file, bits = sys.argv[1:]

def peak():  # MiB since the last call; a process inherits the ru_maxrss of its parent, so Linux tells it otherwise
    try:
        with open("/proc/self/status") as status:
            most = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return most
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1 << 20)

def birdie_methods():
    import birdie
    from birdie.system.mapped import releasing
    from pathlib import Path
    _, coder = method.split()
    settings = dict(lossless=True, effort="fast") if coder == "lossless" else dict(bits=float(bits), effort=coder)
    def save(source):
        state = load_file(source)
        with releasing([Path(source)]):
            birdie.save(state, file, workers=1, **settings)
    return save, lambda: birdie.load(file, workers=1)

def gguf_methods():
    import numpy as np
    from gguf import quants, GGMLQuantizationType as kinds
    def save(source):
        state = {name: w for name, w in load_file(source).items() if w.ndim > 1}
        np.savez(open(file, "wb"), **{n: quants.quantize(w.float().numpy(), kinds.Q4_0) for n, w in state.items()})
    def load():
        with np.load(file) as archive:
            return {n: torch.from_numpy(quants.dequantize(archive[n], kinds.Q4_0)).bfloat16() for n in archive.files}
    return save, load

def torchao_methods():
    from torchao.quantization import quant_primitives as primitives
    from safetensors.torch import save_file
    kind, block = primitives.MappingType.ASYMMETRIC, (1, 64)
    def save(source):
        out = {}
        for name, w in load_file(source).items():
            if w.ndim < 2:
                continue
            scale, zero = primitives.choose_qparams_affine(w.float(), kind, block, torch.int8, 0, 15)
            q = primitives.quantize_affine(w.float(), block, scale, zero, torch.int8, 0, 15)
            packed = q[:, ::2] | q[:, 1::2] << 4
            out |= {name: packed, name + ".s": scale.bfloat16(), name + ".z": zero.to(torch.int8)}
        save_file(out, file)
    def load():
        state, decoded = load_file(file), {}
        for name in [n for n in state if n + ".s" in state]:
            packed = state[name].view(torch.uint8)
            q = torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8)
            scale, zero = state[name + ".s"].float(), state[name + ".z"]
            decoded[name] = primitives.dequantize_affine(q, block, scale, zero, torch.int8, 0, 15).bfloat16()
        return decoded
    return save, load

def zipnn_methods():
    from zipnn import ZipNN
    settings = dict(input_format="torch", bytearray_dtype="bfloat16", threads=1)
    def save(source):
        state = {n: w for n, w in load_file(source).items() if w.ndim > 1}
        parts = {n: bytearray(ZipNN(**settings).compress(w.clone())) for n, w in state.items()}  # it changes its input
        torch.save({n: torch.frombuffer(part, dtype=torch.uint8) for n, part in parts.items()}, file)
    def load():
        parts = torch.load(file, weights_only=True)
        return {n: ZipNN(**settings).decompress(part.numpy().tobytes()) for n, part in parts.items()}
    return save, load

def torch_ans_methods():
    from torch_ans.utils import TorchANSInterface
    def coder(counts, low):
        made = TorchANSInterface(impl="rans32_16", num_parallel_states=8, num_interleaves=4, freq_precision=15,
                                 inverse_cdf_precision="auto", bypass_coding=False)
        size = torch.tensor([counts.numel()], dtype=torch.int32)
        made.init_params(counts.float()[None], size, torch.tensor([low], dtype=torch.int32))
        return made
    def rounded(w, scale):
        return torch.round(w / (w.std(1, keepdim=True) * scale).half().float()).to(torch.int32)
    def entropy(q):
        p = torch.unique(q, return_counts=True)[1] / q.numel()
        return float(-(p * p.log2()).sum())
    def scale_for(w):
        some, low, high = w[:: max(1, len(w) // 64)].float(), 0.02, 4.0
        for _ in range(12):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if entropy(rounded(some, middle)) > float(bits) else (low, middle)
        return high
    def save(source):
        parts = {}
        for n, w in load_file(source).items():
            if w.ndim < 2:
                continue
            w, scale = w.float(), scale_for(w)
            q = rounded(w, scale)
            low = int(q.min())
            counts = torch.bincount((q - low).flatten())
            data = coder(counts, low).encode_with_indexes(q.reshape(1, -1), torch.zeros_like(q).reshape(1, -1))
            rows = (w.std(1, keepdim=True) * scale).half()
            parts[n] = torch.frombuffer(bytearray(data), dtype=torch.uint8), counts.int(), low, rows, tuple(w.shape)
        torch.save(parts, file)
    def load():
        out = {}
        for n, (data, counts, low, rows, shape) in torch.load(file, weights_only=True).items():
            index = torch.zeros((1, shape[0] * shape[1]), dtype=torch.int32)
            q = coder(counts, low).decode_with_indexes(data.numpy().tobytes(), index)
            out[n] = (q.reshape(shape).float() * rows.float()).bfloat16()
        return out
    return save, load

def entropack_methods():
    import entropack
    config = entropack.EntroPackLossyConfig(target_bpp=float(bits), row_rdo_iterations=8)
    def save(source):
        state = {n: w.float() for n, w in load_file(source).items() if w.ndim > 1}
        torch.save({n: entropack.compress(w, config).entropack_quant_state for n, w in state.items()}, file)
    def load():
        unpack = entropack.CompressedTensor.unpack
        states = torch.load(file, weights_only=True)
        return {n: entropack.decompress(unpack(s), config).bfloat16() for n, s in states.items()}
    return save, load

def zstd_methods():
    import zstandard
    def save(source):
        data = b"".join(w.contiguous().view(torch.uint8).numpy().tobytes() for w in load_file(source).values())
        open(file, "wb").write(zstandard.ZstdCompressor(level=19).compress(data))
    return save, lambda: zstandard.ZstdDecompressor().decompress(open(file, "rb").read()) and {}

save, load = globals()[method.split()[0] + "_methods"]()
save(small); load()
before, start = peak(), time.process_time()
save(model)
seconds, compress_peak = time.process_time() - start, peak() - before
start = time.process_time()
decoded = load()
loading = time.process_time() - start
error = norm = 0.0
for name, weight in load_file(model).items():
    if name in decoded and weight.ndim > 1:
        error += float((decoded[name].float() - weight.float()).square().sum(dtype=torch.float64))
        norm += float(weight.float().square().sum(dtype=torch.float64))
print(json.dumps([seconds, loading, compress_peak, os.path.getsize(file), (error / norm) ** 0.5 if norm else 0.0]))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print a row for each size and method."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=comma_separated(one_of(tuple(SIZES), "size")), default=["10M", "50M", "200M"])
    parser.add_argument("--methods", type=comma_separated(one_of(METHODS, "method")), default=list(METHODS))
    parser.add_argument("--bits", type=float, default=4.0, help="bits per weight of birdie (default: 4)")
    parser.add_argument("--folder", type=Path, help="where the models are kept (default: a temporary folder)")
    options = parser.parse_args(arguments)
    with errors_as_exit(OSError), tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows = list(measured(folder, options.weights, options.methods, options.bits))
        report(rows, as_json=options.json)


def measured(folder: Path, sizes: list[str], methods: list[str], bits: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each size and method."""
    folder.mkdir(parents=True, exist_ok=True)
    small = model_file(folder, "small", (1, 256, 512))
    for size in sizes:
        model = model_file(folder, size, SIZES[size])
        weights = count(SIZES[size])
        for method in methods:
            if weights > MOST.get(method, weights):
                continue
            log(f"{size} {method}")
            yield row(method, weights, run_worker(method, small, model, folder / "out", bits))


def row(method: str, weights: int, results: list[float] | str) -> dict[str, Any]:
    """Return a row of the table; a message in place of results says why there are none."""
    if isinstance(results, str):
        return {"method": f"{method}: {results}", "weights": weights} | dict.fromkeys(COLUMNS)
    seconds, loading, peak, file_bytes, error = results
    values = (
        seconds, weights / seconds / 1e6, weights / loading / 1e6, peak, int(file_bytes),
        8 * file_bytes / weights, error,
    )  # fmt: skip
    return {"method": method, "weights": weights} | dict(zip(COLUMNS, values, strict=True))


COLUMNS = ("compress_cpu_s", "compress_M_per_s", "load_M_per_s", "peak_mib", "bytes", "bits", "error")


def run_worker(method: str, small: Path, model: Path, out: Path, bits: float) -> list[float] | str:
    """Return what a process measured, or why it could not."""
    package, python = method.split()[0], sys.executable
    if package in ("gguf", "torchao") and not installed(package):
        return "not installed"
    if package in APART:
        if not RIVALS.exists():
            return "not installed (make rivals)"
        python = str(RIVALS)
    command = [python, "-c", _WORKER, method, str(small), str(model), str(out), str(bits)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    results: list[float] = json.loads(done.stdout.splitlines()[-1])
    return results


def installed(package: str) -> bool:
    """Return whether a package is installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def count(shape: tuple[int, int, int]) -> int:
    """Return the weights of a model of so many layers, that width and that vocabulary."""
    return sum(rows * columns for rows, columns in matrices(shape).values()) + shape[0] * shape[1]


def matrices(shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return name → (rows, columns)."""
    layers, width, vocabulary = shape
    hidden = 11 * width // 4
    layer = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (width // 4, width),
        "self_attn.v_proj": (width // 4, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden),
    }  # fmt: skip
    named = {f"model.layers.{index}.{name}.weight": size for index in range(layers) for name, size in layer.items()}
    return {"model.embed_tokens.weight": (vocabulary, width), **named}


def model_file(folder: Path, name: str, shape: tuple[int, int, int]) -> Path:
    """Write a model into `folder` unless it is there, and return its path."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        draw = statistics()
        generator = np.random.default_rng(0)
        state = {key: draw(generator, *size) for key, size in matrices(shape).items()}
        for index in range(shape[0]):
            state[f"model.layers.{index}.input_layernorm.weight"] = torch.ones(shape[1], dtype=torch.bfloat16)
        save_file(state, path)
    return path


def statistics() -> Callable[[np.random.Generator, int, int], Tensor]:
    """Return a function that draws a bfloat16 matrix with the rows and tails of a trained model, or usual ones."""
    try:
        state = read_state_dict(shared_data() / SOURCE)
    except ConfigError:
        deviations: NDArray[np.float32] = np.exp(0.25 * np.random.default_rng(1).normal(size=4096)).astype(np.float32)
        values = (np.random.default_rng(2).standard_t(8, size=1 << 20) * 0.75**0.5).astype(np.float32)
    else:
        parts = [weight.float().numpy() for weight in state.values() if weight.ndim == 2]
        spreads = [part.std(1) / part.std(1).mean() for part in parts]
        deviations = np.concatenate(spreads)
        values = np.concatenate([(part / part.std(1, keepdims=True)).ravel() for part in parts])

    def draw(generator: np.random.Generator, rows: int, columns: int) -> Tensor:
        scale = 0.02 * deviations[generator.integers(0, deviations.size, rows)]
        picked = values[generator.integers(0, values.size, rows * columns, dtype=np.int32)]
        return torch.from_numpy(picked.reshape(rows, columns) * scale[:, None]).to(torch.bfloat16)

    return draw


if __name__ == "__main__":
    main()
