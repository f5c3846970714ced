"""Every error birdie raises on purpose. A message is one sentence: what is wrong, where, and what to do.

BirdieError
├── ConfigError        a setting is unknown, out of range, or contradicts another
├── DataError          text, a shard, a tokenizer, or how they fit together
├── WeightsError       a checkpoint we were given: unreadable, unsafe, NaN, an unsupported dtype
│   └── ChangedError   another process wrote to one while it was read
├── ArtifactError      a .birdie file: truncated, corrupt, or over a limit
├── BudgetError        the byte budget cannot be met
├── RuleError          scoring would break a rule: a token scored twice, or learned from before it was scored
└── OutputError        something could not be written: no space, no permission, no such folder

What was given decides the class: an argument raises ConfigError, a tensor WeightsError, a .birdie file ArtifactError, a
target OutputError. Docstrings list errors for public functions only.
"""


class BirdieError(Exception):
    """The root: catch this to catch everything birdie raises on purpose."""


class ConfigError(BirdieError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(BirdieError, ValueError):
    """Text, a shard or a tokenizer is missing, malformed, or does not fit the others."""


class WeightsError(BirdieError, ValueError):
    """A checkpoint cannot be used: unreadable, unsafe to open, not finite, or of an unsupported kind."""


class ChangedError(WeightsError):
    """Another process wrote to a checkpoint while it was read."""


class ArtifactError(BirdieError, ValueError):
    """A .birdie file is truncated, corrupt, or larger than the limits allow."""


class BudgetError(BirdieError, ValueError):
    """No setting meets the byte budget."""


class RuleError(BirdieError, RuntimeError):
    """Scoring would break a rule of the challenge: a token scored twice, or learned from before it was scored."""


class OutputError(BirdieError, OSError):
    """A file or folder could not be written."""
