"""Processes that are the ranks of one run, as torchrun starts them, without the seconds each takes to import torch.

They are forked from one server that has imported it and has never computed: nothing else of a rank is shared.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

multiprocessing.set_forkserver_preload(["torch._dynamo", "birdie.pipeline", "hypothesis", "pytest"])


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `function(rank, *arguments)` in `count` processes and wait for all; raises what one of them raised.

    Their environment is that of the first call: the server keeps it.
    """
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")
