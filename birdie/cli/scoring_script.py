"""Entry point of a packed script that only scores: it decodes a .birdie file and logs the challenge's last lines.

`birdie.golf.scoring` packs it with what it needs. DATA_PATH, TOKENIZER_PATH and RUN_ID mean what they mean to the
training script; everything else comes from the recipe in the file.
"""

import importlib
import json
import os
import pkgutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Entry, Reader
from birdie.artifact.decoding import decode_all, require_limits, stored_name
from birdie.cli.challenge import Log, log_roundtrip, score_as_recipe, score_roundtrip
from birdie.compress import schemes
from birdie.compress.scheme import Decoder
from birdie.errors import ArtifactError, BirdieError
from birdie.model.config import GPTConfig
from birdie.model.gpt import GPT
from birdie.runtime.device import choose_device
from birdie.runtime.distributed import process_group, world_from_environment
from birdie.score.request import EvaluationRequest
from birdie.score.settings import EvaluationSettings, replaced


def main(by_recipe: bool) -> None:
    """Score the file that the command line names, else model.birdie; exit with a sentence if that fails.

    Args:
        by_recipe: score with the recipe's evaluation settings, too.
    """
    try:
        _main(Path(sys.argv[1] if len(sys.argv) > 1 else "model.birdie"), by_recipe)
    except BirdieError as error:
        sys.exit(f"error: {error}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(0)  # a rank may abort after Python has ended


def _main(path: Path, by_recipe: bool) -> None:
    device = choose_device("auto", world_from_environment().local_rank)
    with process_group(device) as world:
        log = Log(world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4())), world)
        request = EvaluationRequest(data=os.environ.get("DATA_PATH"), tokenizer=os.environ.get("TOKENIZER_PATH"))
        challenge = replace(request, settings=EvaluationSettings())
        log_roundtrip(log, score_roundtrip(log, path, challenge, world))
        if by_recipe:
            score_as_recipe(log, path, request, world)


def load_gpt(path: Path | str, device: torch.device) -> tuple[GPT, SimpleNamespace, Mapping[str, Any]]:
    """Return the model of an artifact in evaluation mode, its recipe and metadata, as `birdie.run.evaluation` does.

    The recipe has the tables that scoring reads.

    Raises:
        ArtifactError: the file is corrupt, or does not hold a GPT of this version of birdie.
    """
    with Reader(path) as reader:
        fields = file_metadata.parse(bytes(reader.metadata), reader.where).get("metadata", {})
        require_limits(reader, decoder_of, None, shared=True)
        tensors = decode_all(reader, decoder_of, os.cpu_count() or 1)
        state = {name: tensors[stored_name(reader, name)] for name in reader.names}
    try:
        values = json.loads(json.dumps(fields["recipe"]), object_hook=_table)
        config = GPTConfig(**vars(values.model))
        values.evaluation = replaced(EvaluationSettings(), fields["recipe"]["evaluation"], "evaluation")
        model = GPT(config)
        model.load_state_dict(state)
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} does not hold a GPT of the recipe that this script was packed for; score it with birdie"
        ) from error
    values.model = config
    return model.to(device).eval(), values, fields


def _table(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@cache
def _decoders() -> dict[int | None, Decoder]:
    """Return code → decoder of the schemes that this script includes."""
    names = [info.name for info in pkgutil.iter_modules(schemes.__path__)]
    modules = [importlib.import_module(f"{schemes.__name__}.{name}") for name in names]
    return {module.DECODER.code: module.DECODER for module in modules if hasattr(module, "DECODER")}


def decoder_of(entry: Entry) -> Decoder:
    """Return the decoder of an entry.

    Raises:
        ArtifactError: this script does not include its scheme.
    """
    if entry.scheme not in _decoders():
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, which this script does not include; pack the "
            "recipe that exported it"
        )
    return _decoders()[entry.scheme]
