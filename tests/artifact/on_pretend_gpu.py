"""Calls of the public API with modules, tensors and batches on the pretend accelerator; prints what failed, as JSON."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration import synthetic
from birdie.small.qat.settings import Qat
from tests.pretend_gpu import NAME, install

DEVICE = f"{NAME}:0"
FAILURES: dict[str, str] = {}


def attempt(name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "birdie" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        FAILURES[name] = f"{type(error).__name__} {where}: {str(error)[:200]}"


def mlp(device: str = DEVICE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)


def cross_entropy(module: nn.Module, batch: Any) -> Tensor:
    device = next(module.parameters()).device
    return F.cross_entropy(module(batch[0].to(device)), batch[1].to(device))


def squares(module: nn.Module, batch: Any) -> Tensor:
    error: Tensor = module(batch[0].to(DEVICE)) - batch[2].to(DEVICE)
    return error.square().mean()


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.hidden(self.embed(ids))))
        return logits


def main(folder: Path) -> None:
    path = folder / "model.birdie"
    batches = [(torch.randn(32, 64), torch.randint(10, (32,)), torch.randn(32, 10)) for _ in range(5)]
    module = mlp()

    def save(model: Any, **settings: Any) -> Callable[[], object]:
        return lambda: birdie.save(model, path, workers=1, effort="fast", **settings)

    def calibrated(model: Any, *data: Any, **how: Any) -> Callable[[], object]:
        return lambda: save(model, bits=4, calibration=birdie.calibrate(model, *data, **how))()

    attempt("save", save(module))
    attempt("lossless", save(module, lossless=True))
    attempt("bfloat16 state", save({name: tensor.bfloat16() for name, tensor in module.state_dict().items()}, bits=4))
    for scheme in ("trellis", "codebook:k=16"):
        attempt(f"scheme {scheme}", save(module, scheme=scheme))
    for name, loss in (("cross-entropy", cross_entropy), ("squares", squares)):
        how: dict[str, Any] = {} if loss is squares else {"offload": True}
        attempt(f"calibrated, {how}, {name}", calibrated(module, batches, loss, **how))
    attempt("tuned", save(module, bits=4, calibration=birdie.calibrate(module, batches, squares), tune=0.5))
    attempt(
        "module on the CPU, state not",
        save(module.state_dict(), bits=4, calibration=(mlp("cpu"), batches, cross_entropy)),
    )
    attempt("example inputs on the CPU", calibrated(module, example_inputs=batches[0][0]))
    attempt("example inputs on the device", calibrated(module, example_inputs=batches[0][0].to(DEVICE)))
    convolutions = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)).to(DEVICE).eval()
    )
    attempt("noise images, no logits", save(convolutions, bits=6, calibration="synthetic"))
    attempt("random tokens", save(LanguageModel().to(DEVICE), bits=4, calibration="synthetic"))
    save(module, bits=4)()
    attempt("load", lambda: _all_there(birdie.load(path, device=DEVICE)))
    attempt("load into", lambda: birdie.load(path, into=mlp()))
    attempt("lazy", lambda: _lazy(path, batches[0][0]))
    attempt("qat", lambda: _qat(batches[0]))


def _all_there(state: dict[str, Tensor]) -> None:
    assert all(tensor.device == torch.device(DEVICE) for tensor in state.values())


def _lazy(path: Path, inputs: Tensor) -> None:
    birdie.load(path, into=mlp("cpu"), lazy=True, device=DEVICE)(inputs.to(DEVICE))


def _qat(batch: Any) -> None:
    module = mlp()
    quantization = Qat(bits=6).prepare(module)
    assert quantization is not None
    quantization.switch(True)
    torch.autograd.backward(cross_entropy(module.train(), batch))
    module.to("cpu")
    torch.autograd.backward(cross_entropy(module, batch))


if __name__ == "__main__":
    torch.set_num_threads(1)
    synthetic.STEPS = 2  # on images
    with tempfile.TemporaryDirectory() as name, install():
        main(Path(name))
    sys.stdout.write(json.dumps(FAILURES))
