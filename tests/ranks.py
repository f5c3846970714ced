"""Processes that act as the ranks of one run, like those of torchrun, but without seconds of imports for each.

They are forked from one server that has imported torch and has never computed, so ranks share no other state.
"""

import datetime
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.system.distributed import World

multiprocessing.set_forkserver_preload(["torch._dynamo", "birdie.gpt.run.pipeline", "hypothesis", "pytest"])


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `function(rank, *arguments)` in `count` processes, wait for all, and raise what one of them raised.

    Their environment is that of the first call, because the server keeps it.
    """
    start_processes(function, arguments, nprocs=count, start_method="forkserver")


def run_in_process_group(job: Callable[[World, Path], None], size: int, folder: Path) -> None:
    """Call `job(world, folder)` in `size` ranks of a gloo process group, with one thread each, and wait for all."""
    folder.mkdir(exist_ok=True)
    start_ranks(_join_and_call, (job, size, folder), size)


def _join_and_call(rank: int, job: Callable[[World, Path], None], size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    method, wait = f"file://{folder}/rendezvous", datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=wait)
    job(World(rank, size, rank), folder)
    dist.destroy_process_group()


def run_as_ranks(
    program: Callable[..., None], arguments: tuple[Any, ...], count: int, folder: Path, variables: Mapping[str, str]
) -> str:
    """Call `program(*arguments)` in `count` ranks with torchrun's variables, in `folder`; return their stdout.

    Their stderr is in `folder / "stderr"`. Use torchrun itself where starting and restarting processes is tested.

    Args:
        variables: environment variables, in addition to those of torchrun.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**variables, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_ranks(_as_rank, (program, arguments, folder, environment), count)
    return (folder / "stdout").read_text()


def _as_rank(
    rank: int, program: Callable[..., None], arguments: tuple[Any, ...], folder: Path, variables: Mapping[str, str]
) -> None:
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    torch.set_num_threads(1)
    with (folder / "stdout").open("a") as sys.stdout, (folder / "stderr").open("a") as sys.stderr:
        program(*arguments)


def birdie_command(*tokens: str) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(build_app, list(tokens)))
