"""Configurations that come from a file: they choose neither code nor the size of what is built.

    config.json ──harmless──► without names of code ──bounded──► a module with about as many tensors as the file

A library looks some values up: an implementation of attention may be a repository of kernels on the Hub, `auto_map` a
file of Python. So a value that names an implementation is one of torch's own, or it is left out and the library takes
its default: weights and outputs are the same. How many layers there are, a configuration says in words of its own;
building stops as soon as there are more parameters than the tensors of the file explain, or it takes too long.
"""

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from birdie.errors import ConfigError
from birdie.system.platform import interrupt_thread

SECONDS = 60.0  # for a module to be built on the meta device; a usual one takes less than one
_IMPLEMENTATIONS = {"eager", "sdpa"}  # of attention and experts that torch has itself
_IMPLEMENTATION = re.compile(r"_implementation(_internal)?$")
_CODE = {"auto_map", "custom_pipelines"}  # of a configuration: files of Python
_COUNT = re.compile(r"layer|block|depth|stage|expert|head")  # words in keys of numbers of parts
_MOST_PARTS = 1 << 16
# Parameters and modules for each tensor of a file, and as many in any case: experts are stacked in files, and layers
# may share weights.
_PER_TENSOR, _SPARE, _MODULES = 4, 1000, 40


def harmless(config: Any, dropped: list[str] | None = None, path: str = "") -> Any:
    """Return a configuration without what names code.

    Args:
        config: JSON; not changed.
        dropped: takes "key = value" of what was left out.
    """
    dropped = [] if dropped is None else dropped
    if isinstance(config, list):
        return [harmless(item, dropped, path) for item in config]
    if not isinstance(config, dict):
        return config
    kept = {}
    for key, value in config.items():
        keys = f"{path}.{key}".lstrip(".")
        if key in _CODE or (_IMPLEMENTATION.search(key) and not _is_known(value)):
            dropped.append(f"{keys} = {json.dumps(value, allow_nan=True)[:80]}")
        elif isinstance(value, int) and value > _MOST_PARTS and _COUNT.search(key) and not isinstance(value, bool):
            raise ConfigError(f"the configuration has {keys} = {value:,}, more parts than a model has; correct it")
        else:
            kept[key] = harmless(value, dropped, keys)
    return kept


def _is_known(value: Any) -> bool:
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and name in _IMPLEMENTATIONS) for name in names)


def clean_folder(folder: Path) -> None:
    """Rewrite the configurations of a temporary folder without what names code, and log that."""
    for path in sorted(folder.rglob("*.json")):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # the library says what is wrong with it
        dropped: list[str] = []
        cleaned = harmless(config, dropped) if isinstance(config, dict) else config
        if dropped:
            path.write_text(json.dumps(cleaned, indent=2, allow_nan=True), encoding="utf-8")
            logging.getLogger("birdie").warning("%s: left out %s", path.name, ", ".join(dropped))


@contextmanager
def bounded(tensors: int, seconds: float | None = None) -> Iterator[None]:
    """Raise ConfigError once the modules that are built inside have more parts than a file explains, or take too long.

    Args:
        tensors: in the file.
        seconds: that building may take, without weights; None: weights are read inside.
    """
    most, thread = _PER_TENSOR * tensors + _SPARE, threading.get_ident()
    limits = {nn.Parameter: most, nn.Module: _MODULES * most}
    counts = dict.fromkeys(limits, 0)

    def count(kind: type) -> None:
        counts[kind] += threading.get_ident() == thread
        if counts[kind] > limits[kind]:
            raise ConfigError(
                f"the configuration describes a model of more than {limits[kind]:,} {kind.__name__.lower()}s, and the "
                f"file has {tensors:,} tensors; compress the complete folder of the model"
            )

    hooks = (
        register_module_parameter_registration_hook(lambda *_: count(nn.Parameter)),
        register_module_module_registration_hook(lambda *_: count(nn.Module)),
    )
    try:
        with nullcontext() if seconds is None else _deadline(seconds):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _TooLongError(Exception):
    """Building takes longer than it may."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise ConfigError in this thread after so many seconds, between two instructions of Python."""
    thread, lock, running = threading.get_ident(), threading.Lock(), True

    def interrupt() -> None:
        with lock:
            if running:
                interrupt_thread(thread, _TooLongError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _TooLongError as error:
        raise ConfigError(
            f"the configuration describes a model that is not built within {seconds:g} s; load the weights with "
            "birdie.load, or compress them without --calibrate"
        ) from error
    finally:
        with lock:
            running = False
        timer.cancel()
