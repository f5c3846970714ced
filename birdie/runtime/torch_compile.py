"""torch.compile with a fallback to eager mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch

from birdie.runtime.callbacks import Notify

RECOMPILE_LIMIT = 64
"""Graphs of one function, at most. A run may have many sequence lengths, each with and without depth recurrence. Beyond
torch's own limit of 8, torch runs new shapes eagerly without a message."""


def compile_or_eager(function: Callable[..., Any], notify: Notify) -> Callable[..., Any]:
    """Return `function` under torch.compile; when compiling fails, it runs eagerly from then on and `notify` says so.

    torch compiles inside the first call, so the fallback happens there too. The backward graph is compiled together
    with the forward graph: torch would compile it in the first `backward()`, where no fallback can catch a failure.

    Raises (in use):
        torch.OutOfMemoryError: there is too little memory; eager mode would need even more.
    """
    from torch._dynamo import config as dynamo  # slow to import; only needed by callers that compile

    compiled = torch.compile(function, dynamic=False)
    state = {"use": compiled}

    def call(*args: Any, **kwargs: Any) -> Any:
        if state["use"] is function:
            return function(*args, **kwargs)
        try:
            with (
                functorch.patch("force_non_lazy_backward_lowering", True),
                dynamo.patch(recompile_limit=RECOMPILE_LIMIT),
            ):
                return compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises many types; an error of `function` itself recurs in eager mode
            lines = str(error).strip().splitlines() or [type(error).__name__]
            notify(f"torch.compile failed ({lines[0][:120]}); continuing in eager mode")
            state["use"] = function
            return function(*args, **kwargs)

    return call
