"""Packages that birdie works without, and that extras of its distribution install: `birdie-compress[lab]`."""

import json
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "birdie-compress"


def install_line(extra: str) -> str:
    """Return the command that installs an extra, from where birdie came: a checkout, a wheel, or an index (PEP 610)."""
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e '{url2pathname(urlsplit(url).path)}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]{url and f' @ {url}'}'"
