"""Speed of the decoders in C and for browsers (in Node), beside Python's: `python -m benchmarks.web [--json]`.

One row per file: a matrix whose rows have different scales, by scheme and coder. All decode the complete file on one
thread, warm; times are the least processor time of as many runs as fit into `seconds`. C is compiled by `cc -O3`.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import birdie
from benchmarks.command import Row, command_parser, errors_as_exit, report
from benchmarks.processes import take_turns
from birdie.errors import ConfigError
from birdie.standalone import C_DECODER, javascript_decoder

CODERS: tuple[Literal["fast"], Literal["max"]] = ("fast", "max")
SCHEMES = "lossless", "int6", "trellis:states=8,sigma=0.3"
PROGRAM = """
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
const [module, path, seconds] = process.argv.slice(2);
const { decode } = await import(module);
const data = readFileSync(path);
const now = () => process.cpuUsage().user / 1e6;
let best = Infinity;
let tensors;
for (let run = 0, first = now(); run < 3 || now() - first < Number(seconds); run++) {
  const start = now();
  tensors = await decode(data);
  best = Math.min(best, now() - start);
}
const words = new Uint8Array(tensors.weight.data.buffer);
console.log(JSON.stringify([best, createHash("sha256").update(words).digest("hex")]));
"""


_IN_C = """
#include "birdie.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int count, char **arguments) {
    static char data[1 << 28];
    FILE *source = fopen(arguments[1], "rb");
    size_t size = source && count == 3 ? fread(data, 1, sizeof data, source) : 0;
    birdie_file *file;
    birdie_tensor tensor;
    if (birdie_open(data, size, NULL, &file) || birdie_get(file, 0, &tensor)) return 1;
    void *out = malloc(tensor.bytes);
    double best = 1e9;
    for (clock_t first = clock(); clock() - first < atof(arguments[2]) * CLOCKS_PER_SEC;) {
        clock_t start = clock();
        if (birdie_decode(file, 0, BIRDIE_OWN, out, tensor.bytes)) return 1;
        double time = (double)(clock() - start) / CLOCKS_PER_SEC;
        best = time < best ? time : best;
    }
    fprintf(stderr, "%.9f", best);
    fwrite(out, 1, tensor.bytes, stdout);
    return 0;
}
"""


def matrix(rows: int, seed: int) -> Tensor:
    """Return a bfloat16 matrix of `rows` × 1,024 normal weights, whose rows differ in scale."""
    source = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, rows)[torch.randperm(rows, generator=source), None]
    return (torch.randn(rows, 1024, generator=source) * scales).bfloat16()


def decoder_rows(rows: int, seed: int, seconds: float, folder: Path) -> Iterator[Row]:
    """Yield a row for each scheme and coder."""
    (folder / "decode.mjs").write_bytes(javascript_decoder())
    (folder / "measure.mjs").write_text(PROGRAM, encoding="utf-8")
    (folder / "measure.c").write_text(_IN_C, encoding="utf-8")
    flags = "-std=c99", "-O3", "-ffp-contract=off", f"-I{C_DECODER[1].parent}"
    subprocess.run(["cc", *flags, "measure.c", str(C_DECODER[0]), "-o", "measure"], cwd=folder, check=True)
    weight = matrix(rows, seed)
    for scheme in SCHEMES:
        for coder in CODERS:
            path = folder / "model.birdie"
            birdie.save({"weight": weight}, path, scheme=scheme, effort=coder, workers=1)
            command = ["node", "measure.mjs", "./decode.mjs", path.name, str(seconds)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
            browser, digest = json.loads(done.stdout)
            command = [str(folder / "measure"), path.name, str(seconds)]
            native = subprocess.run(command, cwd=folder, capture_output=True, check=True)
            work = partial(birdie.load, path, workers=1)
            python = min(take_turns({"": work}, seconds=seconds, clock=time.process_time)[""])
            words = work()["weight"].view(torch.uint8).numpy().tobytes()
            yield {
                "scheme": scheme,
                "coder": coder,
                "bytes": path.stat().st_size,
                "WebAssembly M/s": weight.numel() / browser / 1e6,
                "C M/s": weight.numel() / float(native.stderr) / 1e6,
                "Python M/s": weight.numel() / python / 1e6,
                "exact": digest == hashlib.sha256(words).hexdigest() and native.stdout == words,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each measurement (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the matrix (default: 0)")
    parser.add_argument("--rows", type=int, default=2048, help="of the matrix (default: 2,048)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit(), tempfile.TemporaryDirectory() as folder:
        if shutil.which("node") is None or shutil.which("cc") is None:
            raise ConfigError("this benchmark needs node and cc; install Node.js 20 or newer, and gcc or clang")
        report(list(decoder_rows(options.rows, options.seed, options.seconds, Path(folder))), as_json=options.json)


if __name__ == "__main__":
    main()
