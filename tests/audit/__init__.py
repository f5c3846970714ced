"""Scripts for the audit: deliberately illegal ones and legal ones, each a miniature of what people submit.

A comment `# wrong: RULE …` says what is broken: at the end of a line the scan must find the first rule there, and the
rules after it (or, on a line of its own, all of them) are for the probes to find.
"""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_WRONG = re.compile(r"^(?P<code>.*?)# wrong: (?P<rules>[a-z\- ]+)$")


@dataclass(frozen=True, slots=True)
class Script:
    """One of them.

    Attributes:
        path: of it.
        scanned: (line, rule) that the scan must find broken.
        probed: rules that probes must find broken.
    """

    path: Path
    scanned: tuple[tuple[int, str], ...]
    probed: tuple[str, ...]

    @property
    def callable(self) -> bool:
        """Whether it offers an entry point to probe."""
        text = self.path.read_text()
        return "\ndef score(" in text or "\ndef scorer(" in text


def _script(path: Path) -> Script:
    scanned, probed = [], []
    for line, text in enumerate(path.read_text().splitlines(), 1):
        found = _WRONG.match(text)
        if found:
            rules = found["rules"].split()
            first = 1 if found["code"].strip() else 0
            scanned += [(line, rule) for rule in rules[:first]]
            probed += rules[first:]
    return Script(path, tuple(scanned), tuple(probed))


ILLEGAL = tuple(_script(path) for path in sorted((HERE / "illegal").glob("*.py")))
LEGAL = tuple(_script(path) for path in sorted((HERE / "legal").glob("*.py")))
