"""Options of drawing tokens: they are checked before a model is loaded, and where it draws."""

import math

from birdie.errors import ConfigError


def require_drawing(temperature: float, top_k: int | None) -> None:
    """Check a temperature, which divides logits (0: the most likely token), and the k most likely tokens (None: all).

    Raises:
        ConfigError: one of them is out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; it must be finite and at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
