"""`train_gpt.py` of a checkout: the training script with the variables of the challenge and its records.

    RUN_ID=… NUM_LAYERS=… ─► recipe ─► preflight ─► script_main: train ─► int8 + zlib, to compare ─► export, score

Each setting of the challenge's script is a field of a recipe dataclass that names its environment variable, and
`gpt.run.environment` handles the variables that the records added, so their commands run unchanged. The code counts as
it would packed. CAP_BYTES replaces the 16,000,000 bytes of code and model.
"""

import io
import os
import sys
import time
from pathlib import Path

import torch

from birdie.golf import int8_zlib
from birdie.golf.packed_script import pack
from birdie.golf.record_log import score_lines
from birdie.golf.script_main import run_script, trained_model, write_artifact
from birdie.golf.script_score import Log, opened, or_exit
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run import preflight
from birdie.gpt.run.environment import remarks
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.work import Work
from birdie.gpt.score.accumulator import Score
from birdie.standalone import PACKAGE
from birdie.system.distributed import run_on_main
from birdie.system.files import write_bytes

UNPACKED_BYTES = 2**32
"""Most bytes that the int8+zlib export may unpack to: far more than any model in this challenge has."""


def main() -> None:
    """Run with the settings of the environment; an error is one sentence on stderr."""
    or_exit(_main)


def _main() -> None:
    origins: dict[str, str] = {}
    recipe = load_recipe(origins=origins)
    with opened(recipe) as (log, work):
        code = log_code(log, recipe)
        if os.environ.get("EVAL_ONLY_PATH"):
            run_script(log, work, code)
            return
        for line in remarks(os.environ):
            log.note(line)
        folder = Path("runs") / log.run_id
        if os.environ.get("RESTORE") != "1":
            for check in preflight.checked(work, folder, origins):
                log.note(check.line)
        model, trained = trained_model(log, work)
        assert trained.score is not None
        log_int8_zlib(log, work, model, trained.score, code)
        write_artifact(log, work, model, trained, code)


def log_code(log: Log, recipe: Recipe) -> int:
    """Log the sources; return the bytes of the script that they would be packed into.

    Ranks that log nothing return 0: packing takes seconds.
    """
    if not log.active:
        return 0
    packed = pack("train", recipe)
    if not packed.minified:
        log.note("python-minifier is not installed, so the code is larger; pip install 'birdie-compress[submit]'")
    log.sources([Path(sys.argv[0]), *(PACKAGE.parent / name for name in sorted(packed.sources))])
    return len(packed.script)


def log_int8_zlib(log: Log, work: Work, model: GPT, trained: Score, code: int) -> None:
    """Write the challenge's int8+zlib export, read it back, and log its bytes and its score."""
    path = Path("runs") / log.run_id / "final_model.int8.ptz"
    run_on_main(work.context.world, work.context.device, lambda: write_int8_zlib(log, work, model, path, code))
    began = time.perf_counter()
    score = work.score(work.new_model(int8_zlib.unpack(path.read_bytes(), UNPACKED_BYTES))).score
    rounded, exact = score_lines("final_int8_zlib_roundtrip", score, (time.perf_counter() - began) * 1000)
    log(rounded)
    log(f"quantization_gap: int8_zlib_bpb:{score.bpb:.8f} int8_zlib_gap:{score.bpb - trained.bpb:+.8f}")
    log(exact)


def write_int8_zlib(log: Log, work: Work, model: GPT, path: Path, code: int) -> None:
    """Write the weights as torch and as the challenge's export have them, and log the bytes."""
    state, export = model.state_dict(), work.recipe.export
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(path.with_name("final_model.pt"), buffer.getvalue())
    log(f"Serialized model: {buffer.tell()} bytes")
    log(f"Code size: {code} bytes")
    log(f"Total submission size: {buffer.tell() + code} bytes")
    packed = int8_zlib.pack(state, int4_layers=export.int4_layers, int4_step=export.int4_step)
    write_bytes(path, packed.blob)
    log(
        f"Serialized model int8+zlib: {len(packed.blob)} bytes (payload:{packed.payload_bytes} "
        f"raw_torch:{packed.raw_bytes} payload_ratio:{packed.payload_ratio:.2f}x)"
    )
    log(f"Total submission size int8+zlib: {len(packed.blob) + code} bytes")
