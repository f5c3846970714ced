"""Laws of chains, for the campaigns: what a chain lists as intact comes back bit for bit, by the commands."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.hostile.workload import CHAIN, End, State, call, contents, problem_of

Ask = Callable[[list[str]], End]


def rows_of(chain: Path, ask: Ask = call) -> tuple[End, list[dict[str, object]]]:
    """Return how `birdie inspect` of a chain ended, and its rows; none if the chain cannot be listed."""
    end = ask(["inspect", str(chain), "--json"])
    return end, json.loads(end.answer).get("checkpoints", []) if end.answer.startswith("{") else []


def restored(link: Path, ask: Ask = call) -> tuple[End, State]:
    """Return how `birdie decompress` of a link ended, and the digests of the files that it wrote."""
    with tempfile.TemporaryDirectory() as name:
        end = ask(["decompress", str(link), "-o", f"{name}/out/"])
        return end, contents(Path(name, "out"))


def states_of(chain: Path) -> dict[str, State]:
    """Return name of a link → the digests of the files of its checkpoint; {} for one that is not restored."""
    return {path.name: restored(path)[1] for path in sorted(chain.glob("*.birdie"))}


def weights_of_run(folder: Path) -> State:
    """Return name of a link → the digest of the weights in it, of the chain of a training run in FOLDER/out/run.

    Other files of a checkpoint have times in them.
    """
    states = states_of(folder / "out" / "run" / CHAIN)
    return {name: state.get("model.safetensors", "not restored") for name, state in states.items()}


def problems_of_run(weights: State, sound: State, *, complete: bool) -> Iterator[str]:
    """Yield what is wrong with the chain of a run that was stopped: a step that does not come back, or is lost.

    Args:
        weights: of the chain, by `weights_of_run`.
        sound: that of a run that nobody disturbed.
        complete: whether it must have all steps of that.
    """
    for name, digest in weights.items():
        if digest != sound.get(name, digest) or digest == "not restored":
            yield f"{name} of the chain: {digest} instead of {sound.get(name, 'its weights')}"
    if complete and (lost := sorted(sound.keys() - weights.keys())):
        yield f"the chain lost {lost}"


def problems_of_links(chain: Path, sound: Mapping[str, State], ask: Ask = call) -> Iterator[str]:
    """Yield broken laws of a damaged chain: each link comes back as it was, or is refused in one sentence.

    What `birdie inspect` calls intact comes back; what it calls damaged does not.

    Args:
        chain: its folder.
        sound: name of a link → the digests of the files of its checkpoint.
        ask: runs a command.
    """
    end, rows = rows_of(chain, ask)
    listed = {str(row["name"]): str(row["damage"]) for row in rows}
    if problem := problem_of(end) if not rows else None:
        yield f"inspect: {problem}"
    if rows and (end.code == 0) == any(listed.values()):
        yield f"inspect: exit code {end.code}, damaged {[name for name, damage in listed.items() if damage]}"
    for path in sorted(chain.glob("*.birdie")):
        end, state = restored(path, ask)
        if problem := problem_of(end):
            yield f"decompress {path.name}: {problem}"
        if state and state != sound.get(path.name):
            yield f"decompress {path.name}: other files {state}"
        if rows and bool(end.code) != bool(listed.get(path.name)):
            yield f"{path.name}: listed as {listed.get(path.name) or 'intact'}, decompress says {end.message or 'done'}"
