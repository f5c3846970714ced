"""torch.compile with a fallback to eager mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch

from birdie.system.callbacks import Notify

RECOMPILE_LIMIT = 64
"""Graphs of one function, at most. A run may have many sequence lengths, each with and without depth recurrence. Beyond
torch's own limit of 8, torch runs new shapes eagerly without a message."""


class CompiledOrEager:
    """A function under torch.compile; when compiling fails, it runs eagerly from then on and `notify` says so.

    torch compiles inside the first call, so the fallback happens there too. The backward graph is compiled together
    with the forward graph: torch would compile it in the first `backward()`, where no fallback can catch a failure.

    Args:
        function: to compile.
        notify: called with the line that says why compiling failed.
        mode: of torch.compile. With "reduce-overhead" on CUDA it replays graphs, which overwrite the results of their
            last run: a caller that keeps one over the next call copies it.

    Attributes:
        eager: whether it runs eagerly now.

    Raises (in use):
        torch.OutOfMemoryError: there is too little memory; eager mode would need even more.
    """

    def __init__(self, function: Callable[..., Any], notify: Notify, mode: str = "default") -> None:
        self._function, self._notify, self._mode = function, notify, mode
        self._compiled = torch.compile(function, dynamic=False, mode=mode)
        self.eager = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config as dynamo  # slow to import; only needed by callers that compile

        if self.eager:
            return self._function(*args, **kwargs)
        if self._mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with (
                functorch.patch("force_non_lazy_backward_lowering", True),
                dynamo.patch(recompile_limit=RECOMPILE_LIMIT),
            ):
                return self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises many types; an error of the function recurs in eager mode
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._notify(f"torch.compile failed ({lines[0][:120]}); continuing in eager mode")
            self.eager = True
            return self._function(*args, **kwargs)
