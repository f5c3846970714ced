"""Text of random words for the tests of data preparation and download."""

import random


def random_lines(count: int, *, seed: int = 0) -> str:
    """Return `count` lines of 30 words each, drawn from 300 random words with an accented letter among them."""
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices("abcdeéstnrl", k=draw.randint(1, 8))) for _ in range(300)]
    return "\n".join(" ".join(draw.choices(lexicon, k=30)) for _ in range(count))
