"""Scripts for the audit: deliberately illegal ones and legal ones, each a miniature of what people submit.

A comment `# wrong: RULE …` says what is broken: at the end of a line the scan must find the first rule there, and the
rules after it (or, on a line of its own, all of them) are for the probes to find. `snippets/` has many more in a few
lines each, in pairs where it can be: `== name: legal`, or the rule that is broken.
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


@dataclass(frozen=True, slots=True)
class Snippet:
    """A few lines of a script.

    Attributes:
        name: of it.
        wrong: the rule it breaks, "" if none.
        body: itself.
    """

    name: str
    wrong: str
    body: str

    def __str__(self) -> str:
        return f"{self.name}: {self.wrong or 'legal'}"


def snippets(name: str) -> tuple[Snippet, ...]:
    """Those of a file in `snippets/`."""
    _, *blocks = (HERE / "snippets" / f"{name}.txt").read_text().split("\n== ")
    heads = [each.split("\n", 1) for each in blocks]
    said = [(*head.rsplit(": ", 1), body.strip("\n")) for head, body in heads]
    return tuple(Snippet(title, "" if wrong == "legal" else wrong, body) for title, wrong, body in said)


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
