"""What torch.compile compiles, when, and how it is kept between runs.

    load ─► first pass, eager ─► priming compiles every graph ─► save ─► the clock ─► none compiled since?

Compiled graphs are code and pickles: whoever can write them can run anything as their reader. They are therefore read
from a folder of the user's own (`read_trusted`), never from a run folder, an artifact or anything else one is given.
What torch keeps is inductor's and autograd's graphs and, on CUDA, Triton's binaries; kernels that the C++ compiler made
for a CPU it leaves to inductor's own folder (`TORCHINDUCTOR_CACHE_DIR`), which is warm on the same machine anyway.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from birdie.errors import OutputError
from birdie.runtime.files import read_trusted, user_cache, write_bytes
from birdie.train.protocols import Trainable

KEPT = 16  # files of a cache folder, the newest
_SUFFIX = ".compiled"
_LENGTHS = ("iterations", "warmdown_iters", "warmdown_fraction", "warmup_steps", "max_wallclock_seconds", "seed")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What this process has compiled so far.

    Attributes:
        graphs: made by torch.compile.
        given_up: frames of code that it left to run eagerly.
        found: parts of them that were in a cache.
        made: parts that were not.
    """

    graphs: int
    found: int
    made: int
    given_up: int = 0

    def since(self, before: "Compiled") -> "Compiled":
        """What came after `before`."""
        return Compiled(
            self.graphs - before.graphs,
            self.found - before.found,
            self.made - before.made,
            self.given_up - before.given_up,
        )

    def line(self) -> str:
        """In words."""
        kept = f", {self.found} of {self.found + self.made} parts from a cache" if self.found + self.made else ""
        eager = f", {self.given_up} given up, which run eagerly" if self.given_up else ""
        return f"{self.graphs} graph{'s'[: self.graphs != 1]} compiled{kept}{eager}"


def compiled() -> Compiled:
    """Counts of this process; nothing where nothing was ever compiled, without importing the compiler."""
    if "torch._dynamo.utils" not in sys.modules:
        return Compiled(0, 0, 0)
    counters = sys.modules["torch._dynamo.utils"].counters
    inductor, frames = counters["inductor"], counters["frames"]
    return Compiled(
        counters["stats"]["unique_graphs"],
        inductor["fxgraph_cache_hit"],
        inductor["fxgraph_cache_miss"],
        frames["total"] - frames["ok"],
    )


def first_pass(model: Trainable, length: int, device: torch.device) -> None:
    """One eager pass of the longest sequence, so that what is made at first use is there before any graph is traced.

    A graph traced before holds that making, and is compiled for nothing: the next step needs another without it.
    """
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    with torch.no_grad():
        model.loss(ids, ids)


class CompileCache:
    """Compiled graphs of one kind of run in a file of the user's cache folder.

    Args:
        folder: made for the user alone if it is not there.
        settings: all that decides what is compiled, in plain values; torch, Python and device are added.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], device: torch.device) -> None:
        about = {
            "settings": settings,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key}{_SUFFIX}"

    def load(self) -> str | None:
        """Give torch what an earlier run left, before anything is compiled; returns a warning if there is one.

        A file that is damaged, or that somebody else could have written, is left alone.
        """
        if not self.path.exists():
            return None
        try:
            content = read_trusted(self.path)
        except OSError as error:
            reason = error.strerror or str(error)
            return f"compiled graphs in {self.path} are not used ({reason.lower()}); compiling anew"
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            return f"compiled graphs in {self.path} are damaged; compiling anew"
        try:
            found = torch.compiler.load_cache_artifacts(payload)
        except Exception as error:  # of whatever kind: it is only a cache
            return f"compiled graphs in {self.path} are not used ({type(error).__name__}); compiling anew"
        return None if found else f"torch does not take the compiled graphs in {self.path}; compiling anew"

    def save(self) -> str | None:
        """Keep what this process has compiled; returns a warning if that cannot be."""
        try:
            found = torch.compiler.save_cache_artifacts()
            if found is None:
                return None
            payload = found[0]
            for folder in (self.path.parent.parent, self.path.parent):  # the mode is that of the last folder alone
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self.path, hashlib.sha256(payload).digest() + payload)
            self.path.chmod(0o600)
            newest = sorted(self.path.parent.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in newest[KEPT:]:
                old.unlink(missing_ok=True)
        except (OSError, OutputError, RuntimeError, AssertionError) as error:
            return f"compiled graphs are not kept ({' '.join(str(error).split())[:120]})"
        return None


class Compiling:
    """What a run compiles: before its clock, it is hoped.

    Args:
        cache: where to keep it; None: nowhere.
        notify: gets a line when all is primed, and one at the end; nothing where nothing is compiled.

    Attributes:
        primed: what priming compiled.
        late: graphs compiled after it, inside the clock.
    """

    def __init__(self, cache: CompileCache | None, notify: Callable[[str], None]) -> None:
        self._cache, self._notify = cache, notify
        self.primed, self.late = Compiled(0, 0, 0), 0
        self._at_first = self._at_primed = compiled()

    def before(self) -> None:
        """Priming begins."""
        self._warn(None if self._cache is None else self._cache.load())
        self._at_first = compiled()

    def ready(self, *, keep: bool) -> None:
        """Priming is over; `keep`: whether this rank writes to the cache what was not in it."""
        self._at_primed = compiled()
        self.primed = self._at_primed.since(self._at_first)
        self._notify(f"torch.compile: {self.primed.line()} before the clock")
        if keep and self._cache is not None and (self.primed.made or not self._cache.path.exists()):
            self._warn(self._cache.save())

    def ended(self) -> None:
        """The run is over."""
        self.late = compiled().since(self._at_primed).graphs
        if self.late:
            self._notify(
                f"torch.compile: {self.late} graph{'s'[: self.late != 1]} compiled inside the clock; more warmup_steps "
                "would have had them before it"
            )
        else:
            self._notify("at work: torch.compile: no graph compiled inside the clock")

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self._notify(warning)


def cache_folder(name: str) -> Path | None:
    """The folder that `auto`, `none` or a path means; auto: the user's cache folder."""
    if name == "none":
        return None
    if name != "auto":
        return Path(name).expanduser()
    return user_cache() / "compiled"


def cache_of(recipe: Mapping[str, Any], rank: int, ranks: int, device: torch.device) -> CompileCache | None:
    """The cache of ranks that compile the same: model, batch, lengths, precision and what is rounded inside the graph.

    Args:
        recipe: in plain values, by table; its `run.compile_cache` names the folder.
        rank: this one.
        ranks: that share the batch.
        device: of this rank.
    """
    folder = cache_folder(recipe["run"]["compile_cache"])
    if folder is None:
        return None
    train = {name: value for name, value in recipe["train"].items() if name not in _LENGTHS}
    of = rank % kinds_of_rank(recipe)
    about = {"model": recipe["model"], "train": train, "qat": recipe["qat"], "ranks": ranks, "of": of}
    return CompileCache(folder, about, device)


def kinds_of_rank(recipe: Mapping[str, Any]) -> int:
    """After so many ranks comes one that compiles what the first does."""
    return max(1, len(recipe["train"].get("mixed_seq_lens", ())))


CompileCacheName = Annotated[
    str,
    Parameter(
        env_var="COMPILE_CACHE",
        help="Folder of one's own where compiled graphs are kept between runs; auto: in the user's cache folder; none.",
    ),
]
