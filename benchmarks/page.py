"""Bytes and speed of a page with a model: `python -m benchmarks.page [--model FILE] [--json]`.

The model is that of `recipes/demo.toml` with random weights, in its budget, or the one in FILE. Its JavaScript runs in
Node on one thread; Python samples with a KV cache, too. Times are the least processor time of as many runs as fit into
`seconds`; tokens fill the context once.
"""

import dataclasses
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import Row, command_parser, errors_as_exit, report
from benchmarks.processes import take_turns
from birdie.artifact.saving import save
from birdie.errors import ConfigError
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.evaluation import load_gpt
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe
from birdie.standalone import DECODER, PAGE_PROGRAM
from birdie.web.model_page import FOLDER, model_page, model_recipe
from birdie.web.model_plan import model_plan

PROGRAM = """
import { readFileSync } from "node:fs";
const [decoder, program, models, path, plan, seconds] = process.argv.slice(2);
const { decode, useProgram } = await import(decoder);
const { Model } = await import(models);
const data = readFileSync(path);
const settings = JSON.parse(plan);
const now = () => process.cpuUsage().user / 1e6;
async function least(work) {
  let best = Infinity;
  for (let run = 0, first = now(); run < 3 || now() - first < Number(seconds); run++) {
    const start = now();
    await work();
    best = Math.min(best, now() - start);
  }
  return best;
}
useProgram(readFileSync(program));
const start = now();
const tensors = await decode(data);
const once = now() - start; // as a page does: compiled, and not yet optimized
const decoding = await least(() => decode(data));
const model = new Model(settings, tensors);
const sampling = await least(() => {
  model.reset();
  for (let token = 0; token < settings.context; token++) model.step(token % 97);
});
console.log(JSON.stringify([once, decoding, settings.context / sampling]));
"""


def demo_model(path: Path, *, small: bool) -> None:
    """Write a file like that of `birdie demo`, with random weights and a tokenizer of bytes."""
    recipe = find("demo").recipe()
    shape = dataclasses.replace(recipe.model, num_layers=1, model_dim=32) if small else recipe.model
    recipe = dataclasses.replace(recipe, model=shape, data=dataclasses.replace(recipe.data, tokenizer="bytes"))
    torch.manual_seed(0)
    model = GPT(recipe.model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2 and len(weight) > 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    metadata = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    save(model, path, budget=40_000 if small else 450_000, metadata=metadata)


def page_row(path: Path, seconds: float) -> Row:
    """Return the row of a file."""
    recipe = model_recipe(path)
    page = model_page(path, recipe, load_tokenizer(recipe.data.tokenizer), title="benchmark")
    plan = json.dumps(model_plan(recipe.model, recipe.train.train_seq_len))
    sources = [DECODER.as_uri(), str(PAGE_PROGRAM), (FOLDER / "model.js").as_uri()]
    command = ["node", "--input-type=module", "--eval", PROGRAM, "-", *sources, str(path), plan, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    once, decoding, speed = json.loads(done.stdout)
    return {
        "model bytes": page.parts["weights"],
        "page bytes": len(page.data),
        "ratio": len(page.data) / page.parts["weights"],
        "first decode s": once,
        "decode s": decoding,
        "decode M/s": page.weights / decoding / 1e6,
        "tokens/s": speed,
        "Python tokens/s": python_speed(path, recipe, seconds),
    }


def python_speed(path: Path, recipe: Recipe, seconds: float) -> float:
    """Return the tokens per second of the same model in Python, token by token with a KV cache."""
    model, _, _ = load_gpt(path, torch.device("cpu"))
    context = recipe.train.train_seq_len

    def work() -> None:
        cache = Cache(model, 1, context)
        for token in range(context):
            cache(torch.tensor([[token % 97]]))

    return context / min(take_turns({"": work}, seconds=seconds, clock=time.process_time)[""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a .birdie file of `birdie train` (default: like that of the demo)")
    parser.add_argument("--small", action="store_true", help="a far smaller model, to see that it runs")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each measurement (default: 4)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit(), tempfile.TemporaryDirectory() as folder:
        if shutil.which("node") is None:
            raise ConfigError("this benchmark needs node; install Node.js 20 or newer")
        path = options.model or Path(folder, "model.birdie")
        if options.model is None:
            demo_model(path, small=options.small)
        report([page_row(path, options.seconds)], as_json=options.json)


if __name__ == "__main__":
    main()
