"""Registration of birdie's quantizer with transformers."""


def register() -> None:
    """Let transformers load birdie folders in this process: `AutoModel.from_pretrained(folder)`.

    Raises:
        ImportError: transformers is not installed.
    """
    from birdie.hub import quantizer  # noqa: F401  (importing it registers it)
