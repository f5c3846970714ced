"""Made-up arguments of a model's forward function, by its signature and configuration.

    forward(input_ids, pixel_values, …) ──► arguments by their names ──┐
    configuration and its parts ──► their sizes ───────────────────────┴─► tried on a few samples ──► the first that run
                                                       ▲                         │
                     sizes that its weights expect ────┴── a layer that fails ◄──┘

A configuration does not tell everything: positions may begin at an offset, sounds may have channels, and images may
need tokens that stand for them. So there are a few attempts for each model; what its forward function accepts is taken.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from birdie.compress.calibration.modes import measuring_mode
from birdie.compress.calibration.runs import Runs
from birdie.compress.calibration.synthetic import LENGTH, Inputs, forward
from birdie.errors import ConfigError
from birdie.hub.fitting import Failure, corrections, fitted
from birdie.hub.makers import (
    DECODER,
    IF_NEEDED,
    LAYOUTS,
    LENGTHS,
    MAKERS,
    MASKS,
    OF_LAYOUT,
    OF_LENGTH,
    SHORT,
    TEXT,
    Attempt,
    Sizes,
    maker_of,
    with_image_tokens,
)

TRIED = 3  # samples of an attempt; two are a pair of something else too easily
_HALVINGS = 3  # of an image's edge, and so on
_CORRECTIONS = 12  # of the sizes of one attempt
_ATTEMPTS = 100  # that are tried, and tried again with corrections
_SEARCH = 30  # of the most work of an attempt, all of them together: about as long as the calibration
_ELEMENT, _CALL = 30, 200_000  # work of an element that is computed, and of a call, in that of FLOPs of a product
_NEVER = ("inputs_embeds", "labels", "past", "cache", "position", "mask")  # not made up unless needed


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Counts the work in its context, in FLOPs of products that take as long; so files do not depend on clocks.

    Attributes:
        calls: work of functions, whatever the samples.
        samples: work that grows with the samples.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.samples = 0.0

    @property
    def total(self) -> float:
        """Work of both kinds."""
        return self.calls + self.samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and count it."""
        out = func(*args, **(kwargs or {}))
        self.calls += _CALL
        self.samples += _ELEMENT * sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.samples += flops(*args, **(kwargs or {}), out_val=out)
        return out


def work_of(model: nn.Module, keywords: Mapping[str, Any], spent: Work | None = None) -> Work:
    """Return the work of a forward pass, and add it to what was spent before, even if it fails."""
    work = Work()
    with measuring_mode(model), Runs(model).run(0, keywords), spent or nullcontext(), work:
        forward(model, Inputs(keywords=keywords))
    return work


def input_names(model: Any) -> list[list[str]]:
    """Return the sets of arguments to try: all that are known, those that are needed, and the main one."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name for name, one in parameters.items() if one.default is inspect.Parameter.empty and one.kind not in kinds
    ]
    main = str(getattr(model, "main_input_name", ""))
    if main and main not in needed and main in parameters:
        needed.insert(0, main)
    known = [name for name in parameters if name in needed or (name in MAKERS and name not in MASKS)]
    if main:
        unwanted = IF_NEEDED - ({"token_type_ids"} if hasattr(model.config, "type_vocab_sizes") else set())
        known = [name for name in known if name in needed or name not in unwanted]
        masked = [*known, *(name for name in parameters if name in MASKS and name not in known)]
        decoded = [*needed, *(name for name in known if name.startswith("decoder_input") and name not in needed)]
        sets = [known, masked, decoded, needed]
    else:  # diffusers: what is optional differs between kinds of one class
        plain = [name for name in known if name != "class_labels" and not name.startswith("added")]
        sets = [known, plain, [name for name in known if name in needed or name == "timestep"], needed]
    optional = [name for name, one in parameters.items() if "Tensor" in str(one.annotation) and name not in known]
    return [*sets, *([*known, name] for name in optional if not name.startswith(_NEVER))]


def attempts(model: Any) -> Iterator[Attempt]:
    """Yield what to try for a model of transformers or diffusers, from the most complete to the simplest."""
    config = getattr(model, "config", None)
    texts = [config, *(getattr(config, part, None) for part in (*TEXT, *DECODER) if part)]
    limits = [value for text in texts for name in LENGTHS if isinstance(value := getattr(text, name, None), int)]
    length = min([LENGTH, *(limit for limit in limits if limit > 1)])
    lengths = [length, max(length - 8, length // 2), max(1, length // 2), min(length, SHORT)]
    for names in dict.fromkeys(map(tuple, input_names(model))):
        has_length, has_layout = OF_LENGTH.intersection(names), OF_LAYOUT.intersection(names)
        has_unknown = any(name not in MAKERS for name in names)
        for index, other, layout in itertools.product(
            range(4 if has_length else 1), range(LAYOUTS if has_unknown else 1), range(LAYOUTS if has_layout else 1)
        ):
            yield Attempt(names, lengths[index], layout, other)


def arguments(model: Any, attempt: Attempt, samples: int, generator: torch.Generator) -> dict[str, Any]:
    """Return the arguments of an attempt, for so many samples, on the model's device."""
    sizes = Sizes(model, attempt, generator)
    parameters = inspect.signature(model.forward).parameters
    keywords = {
        name: value
        for name in attempt.names
        if (value := maker_of(name, parameters[name].annotation)(sizes, samples)) is not None
    }
    for fit in attempt.fits:
        keywords[fit.name] = fitted(keywords[fit.name], fit, generator)
    if "input_ids" in keywords and "pixel_values" in keywords:
        keywords = with_image_tokens(sizes, keywords)
    is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    if "use_cache" in parameters or (is_open and sizes.value("use_cache", parts=("", *DECODER[:-1])) is not None):
        # nothing follows; and caches know some kinds of layers only
        keywords["use_cache"] = False
    return dict(tree_map_only(Tensor, lambda tensor: tensor.to(sizes.device), keywords))


def first_accepted(model: nn.Module, generator: torch.Generator, most: float) -> tuple[Attempt, Work]:
    """Return the first attempt that the model accepts, and the work of `TRIED` samples.

    If it accepts none as it is, their sizes are corrected, unless the search takes longer than the calibration. Sizes
    that no configuration names are halved until they are `most` work, or there is nothing left to halve.
    """
    reason: Exception | None = None
    spent = Work()
    for most_corrections in (0, _CORRECTIONS):
        for attempt in itertools.islice(attempts(model), _ATTEMPTS):
            if spent.total > _SEARCH * most:
                break
            try:
                accepted, work = _corrected(model, attempt, generator, most_corrections, spent)
            except Exception as error:  # whatever the code of the model raises
                reason = reason or error
            else:
                return _halved(model, accepted, work, generator, most)
    unknown = ", ".join(name for name in input_names(model)[0] if name not in MAKERS)
    names = f" (nothing is known of {unknown})" if unknown else ""
    raise ConfigError(f"inputs of {type(model).__name__} cannot be made up{names}: {reason}") from reason


def _corrected(
    model: nn.Module, attempt: Attempt, generator: torch.Generator, most: int, spent: Work
) -> tuple[Attempt, Work]:
    """Return an attempt with the sizes that the model's layers expect, after so many corrections at most."""
    while True:
        keywords, failure = arguments(model, attempt, TRIED, generator), Failure()
        try:
            with failure:
                return attempt, work_of(model, keywords, spent)
        except Exception:
            fits = (*attempt.fits, *corrections(failure, keywords))
            if fits == attempt.fits or len(fits) > most:
                raise
            attempt = replace(attempt, fits=fits)


def _halved(
    model: nn.Module, attempt: Attempt, work: Work, generator: torch.Generator, most: float
) -> tuple[Attempt, Work]:
    for halvings in range(1, _HALVINGS + 1):
        if work.total <= most:
            break
        smaller = replace(attempt, halvings=halvings)
        try:
            less = work_of(model, arguments(model, smaller, TRIED, generator))
        except Exception:  # too small for this model
            break
        if less.total < work.total:
            attempt, work = smaller, less
    return attempt, work
