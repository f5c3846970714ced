"""Entry point of a packed script that only scores: it decodes a .birdie file and logs the challenge's last lines.

DATA_PATH, TOKENIZER_PATH and RUN_ID mean what they mean to the training script; everything else comes from the recipe
in the file.
"""

import os
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from birdie.cli.challenge_log import Log, log_roundtrip, score_as_recipe, score_roundtrip
from birdie.cli.console import exit_code_of, leave
from birdie.runtime.device import choose_device
from birdie.runtime.distributed import process_group, world_from_environment
from birdie.score.request import EvaluationRequest
from birdie.score.settings import EvaluationSettings


def main(by_recipe: bool) -> None:
    """Score the file that the command line names, else model.birdie; exit with a sentence if that fails.

    Args:
        by_recipe: score with the recipe's evaluation settings, too.
    """
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "model.birdie")
    leave(exit_code_of(lambda: _main(path, by_recipe)))


def _main(path: Path, by_recipe: bool) -> None:
    device = choose_device("auto", world_from_environment().local_rank)
    with process_group(device) as world:
        log = Log(world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4())), world)
        request = EvaluationRequest(data=os.environ.get("DATA_PATH"), tokenizer=os.environ.get("TOKENIZER_PATH"))
        challenge = replace(request, settings=EvaluationSettings())
        log_roundtrip(log, score_roundtrip(log, path, challenge, world))
        if by_recipe:
            score_as_recipe(log, path, request, world)
