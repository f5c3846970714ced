"""Lines to read: a dozen patterns over the text of a script, which is unpacked but never run.

    source, or what it unpacks ──► lines ──► patterns ──► warnings: file, line, what to look for

A pattern is what withdrawn scores had: a backward pass while scoring, the smaller of two losses, a hash of the target.
Legal scripts have such lines as well, test-time training above all, and only a person can judge them. So a match is a
warning and decides nothing, and no match proves nothing.
"""

import re
from typing import NamedTuple

from birdie.golf.audit import rules
from birdie.golf.audit.rules import Finding, Rule
from birdie.golf.audit.source import Source, parse_source

_SHOWN = 6  # further lines that a finding names
_LONGEST = 10_000  # characters of a line that is searched: packed code would match by chance
_LONG = "\0"  # in place of a longer line


class Pattern(NamedTuple):
    """Text that points at a line, and the question that a reader of the line should answer."""

    rule: Rule
    text: re.Pattern[str]
    question: str


def _pattern(rule: Rule, text: str, question: str) -> Pattern:
    return Pattern(rule, re.compile(text, re.IGNORECASE), question)


# Each repetition has a bound: a line may have as many characters as a file.
PATTERNS = (
    _pattern(
        rules.SCORE_FIRST,
        r"\.backward\(|autograd\.grad\(|partial_fit\(",
        "learns: also from validation tokens, and is the loss of each final before?",
    ),
    _pattern(
        rules.SCORE_FIRST,
        r"(scatter|index)_add_?\(|index_put_?\(|\badd\.at\(|\bcounts?\[.{0,80}\+=",
        "counts: validation tokens, and is the loss of each final before?",
    ),
    _pattern(
        rules.ONE_PASS,
        r"\b(minimum|fmin|amin)\(|\bmin\([^)\n]{0,40}(loss|nll|nats)",
        "takes the smaller of two values: of two losses of one token?",
    ),
    _pattern(
        rules.NORMALIZED,
        r"(?<![\w.])hash\(|crc32\(|bitwise_xor|\*.{0,40}\^|\^.{0,40}\*|\* *\d{5,12}.{0,40}[%&]",
        "hashes: is the target token in the key, and is there a sum over the vocabulary?",
    ),
    _pattern(
        rules.NORMALIZED,
        r"logaddexp|\b1(\.0?)? *- *\w{1,40}\)? *\*",
        "mixes two values: two distributions, both over the same, whole vocabulary?",
    ),
    _pattern(
        rules.NORMALIZED,
        r"== *(y|tgt|targets?|labels?|next_tokens?|gold)\b|\b(y|tgt|targets?|labels?) *==",
        "compares with targets: is a probability raised where they are equal?",
    ),
    _pattern(
        rules.VALIDATION,
        r"register_(full_)?(forward|backward)(_pre)?_hook\(|\b(\w{1,30})\.m?T *@ *\4\b|\bhessians? *=",
        "collects activations: of training text alone?",
    ),
    _pattern(
        rules.VALIDATION,
        r"\b(nan)?argmin\(|\bminimize(_scalar)?\(|\bif\b.{0,60}(loss|bpb|nll|nats)\w{0,20} *< *\w{0,20}best",
        "chooses by a result: by that of validation tokens?",
    ),
    _pattern(
        rules.BYTES,
        r"id_?to_?piece|id_to_token|convert_ids_to_tokens|is_byte\(|<0x|▁|\\u2581",
        "counts bytes of pieces: <0xNN> is one byte, ▁ is one space, and it counts once",
    ),
    _pattern(
        rules.TRAIN_TIME,
        r"wall_?clock.{0,40}?\b(60[1-9]|6[1-9]\d|[7-9]\d\d|\d{4,9})\b",
        "sets a limit of time above 600: of training?",
    ),
    _pattern(
        rules.TRAIN_TIME,
        r"forced?_?stop|stop_at_step|stop_step|ignore_?(cap|wall_?clock)",
        "ends training at a step: does the clock end it, too?",
    ),
    _pattern(
        rules.SELF_CONTAINED,
        r"urlopen|urlretrieve|\brequests\.|create_connection|HTTPS?Connection|hf_hub_download|snapshot_download|"
        r"load_dataset|\b(run|system|call|Popen|check_output)\(.{0,60}\b(curl|wget|gsutil|pip install|git clone)\b",
        "uses the network: while it evaluates?",
    ),
    _pattern(rules.SELF_CONTAINED, r"_train_[\w*]{0,20}\.bin", "names training data: read while validation is scored?"),
    _pattern(
        rules.SELF_CONTAINED,
        r"(?<![\w.])(exec|eval|__import__)\(|\bimport_module\(",
        "runs code that it makes: read where that comes from",
    ),
    _pattern(rules.SELF_CONTAINED, _LONG, f"has more than {_LONGEST:,} characters, which were not searched"),
)


def scan(source: bytes | Source, shown: str, *, unlimited: bool = False) -> tuple[Finding, ...]:
    """Return a warning for each pattern that lines of `source` match, or lines of the script that it unpacks.

    Args:
        source: of a file, or its bytes.
        shown: its path in findings.
        unlimited: whether the track has no cap on training time.
    """
    source = parse_source(source) if isinstance(source, bytes) else source
    if source.modules:  # they are sources of their own
        return ()
    prefix = ""
    if source.unpacked is not None:
        source, prefix = parse_source(source.unpacked), "in the source that it unpacks: "
    findings = []
    if problem := source.damage or source.problem:
        findings.append(Finding(rules.SELF_CONTAINED, "unknown", prefix + problem, "scan", shown, source.line))
    text = source.data.decode("utf-8", "replace")
    lines = [line if len(line) <= _LONGEST else _LONG for line in text.splitlines()]
    code = [(number, line) for number, line in enumerate(lines, 1) if not line.lstrip().startswith("#")]
    for rule, pattern, question in PATTERNS:
        matches = [number for number, line in code if pattern.search(line)]
        if matches and not (unlimited and rule == rules.TRAIN_TIME):
            evidence = f"{prefix}{question}{_others(matches[1:])}"
            findings.append(Finding(rule, "warning", evidence, "scan", shown, matches[0]))
    return tuple(findings)


def _others(lines: list[int]) -> str:
    if not lines:
        return ""
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f" (also line{'s' * (len(lines) > 1)} {', '.join(map(str, lines[:_SHOWN]))}{more})"
