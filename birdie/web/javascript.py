"""One JavaScript module of several: joined in the order of their imports, without comments and blank space.

    modules ─► tokens ─► names that differ between modules ─► one module ─► short names of variables ─► text

Variables get short names, one for each name, wherever it stands: so scopes need not be known, only which words are
variables. Properties, strings and what no module declares stay as they are. The source is JavaScript as birdie/web
has it: a semicolon ends each statement, imports and exports are lists of names, without default and `as`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from string import ascii_letters, digits

from birdie.errors import ConfigError

_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | //[^\n]* | /\*.*?\*/ )
  | (?P<word> [A-Za-z_$][\w$]* )
  | (?P<number> 0[xob][\da-fA-F_]+n? | (?: \d[\d_]*\.?[\d_]* | \.\d[\d_]* )(?: [eE][+-]?\d+ | n )? )
  | (?P<string> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
  | (?P<mark> >>>= | \.\.\. | \?\?= | \|\|= | &&= | \*\*= | <<= | >>= | >>> | === | !== | => | \?\.(?!\d) | \?\?
        | == | != | \*\* | << | >> | <= | >= | && | \|\| | \+\+ | -- | [-+*/%&|^]= | [-+*/%&|^!~<>=?:;,.(){}\[\]] )
    """,
    re.VERBOSE | re.DOTALL,
)
_REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_TEMPLATE = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(?:\$\{|`)", re.DOTALL)
# Types in JSDoc: braces within those of a type are balanced.
_TYPE = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_DOCUMENTED = re.compile(r"/\*\*((?:(?!\*/).)*)\*/\s*export (?:async )?function (\w+)", re.DOTALL)
_PARAMETER = re.compile(rf"@param {_TYPE} (\[?)(\w+)")
_RETURNED = re.compile(rf"@returns {_TYPE}")
_TYPEDEF = re.compile(r"/\*\*\n \* @typedef \{object\} (?:(?!\*/).)*\*/", re.DOTALL)
_RESERVED = frozenset(
    {
        *("async", "await", "break", "case", "catch", "class", "const", "continue", "debugger", "default", "delete"),
        *("do", "else", "export", "extends", "false", "finally", "for", "from", "function", "get", "if", "import"),
        *("in", "instanceof", "let", "new", "null", "of", "return", "set", "static", "super", "switch", "this"),
        *("throw", "true", "try", "typeof", "undefined", "var", "void", "while", "with", "yield"),
    }
)
_OPERATORS = frozenset({"(", ",", "=", ":", "[", "?", "&&", "||", "??"})
_PRECEDES_OBJECT = _OPERATORS | {"...", "return", "const", "let", "??=", "in", "of", "import", "export"}
_PRECEDES_REGEX = _OPERATORS | {"!", "&", "|", "{", "}", ";", "=>", "return", "typeof"}
_PRECEDES_CONDITION = frozenset({"if", "for", "while", "switch", "with"})
_CLOSING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True, slots=True)
class _Token:
    """A token. Of words the kind is "reserved", "variable", "property", or "shorthand", which is both."""

    kind: str
    text: str


@dataclass(slots=True)
class _Bundle:
    """Modules so far.

    Attributes:
        exports: path → exported name → its name in the bundle.
        tokens: of the modules, one after another.
        names: that modules declare outside of functions.
        types: name of an exported function in the bundle → its type in JSDoc.
    """

    exports: dict[Path, dict[str, str]] = field(default_factory=dict)
    tokens: list[_Token] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    types: dict[str, str] = field(default_factory=dict)


def bundle(entry: Path) -> str:
    """Return one module of `entry` and the modules that it imports; it exports what `entry` does.

    Raises:
        ConfigError: a module has JavaScript of another kind than the docstring of this module says.
    """
    joined = _Bundle()
    exports = _add(joined, entry.resolve())
    short = _short_names(joined.tokens, exports)
    text = _joined(_merged(_renamed(joined.tokens, short)))
    if not exports or not {*exports.values()} <= joined.types.keys():
        return text + f"export{{{','.join(f'{short[name]} as {key}' for key, name in exports.items())}}};\n"
    typed = [
        f"/** @type {{{joined.types[name]}}} */\nexport const {key}={short[name]};" for key, name in exports.items()
    ]
    return "\n".join([text, *_TYPEDEF.findall(entry.read_text(encoding="utf-8")), *typed, ""])


def _add(joined: _Bundle, path: Path) -> dict[str, str]:
    """Add a module after those that it imports; return exported name → its name in the bundle."""
    if path in joined.exports:
        return joined.exports[path]
    tokens = _classified(list(_tokens(path)))
    names: dict[str, str] = {}  # of this module → in the bundle
    public: list[str] = []
    body: list[_Token] = []
    depth = at = 0
    while at < len(tokens):
        token = tokens[at]
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        if depth or token.text not in ("import", "export"):
            body.append(token)
            at += 1
        elif tokens[at + 1].text == "{":
            end = next(index for index in range(at, len(tokens)) if tokens[index].text == ";")
            listed = [one.text for one in tokens[at:end] if one.kind in ("shorthand", "variable")]
            if token.text == "import":
                exports = _add(joined, (path.parent / tokens[end - 1].text[1:-1]).resolve())
                names |= {name: exports[name] for name in listed}
            else:
                public += listed
            at = end + 1
        else:
            public.append(next(one.text for one in tokens[at:] if one.kind == "variable"))
            at += 1
    for name in _top_level(body):
        numbered = (name if number == 1 else f"{name}_{number}" for number in count(1))
        names[name] = next(one for one in numbered if one not in joined.names)
        joined.names.add(names[name])
    joined.tokens += _renamed(body, names)
    joined.types |= {names[name]: kind for name, kind in _function_types(path.read_text(encoding="utf-8"))}
    joined.exports[path] = {name: names[name] for name in public}
    return joined.exports[path]


def _function_types(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, type) of each exported function whose comment has its types."""
    for comment, name in _DOCUMENTED.findall(source):
        parameters = (
            f"{parameter}{'?' if optional else ''}: {kind}" for kind, optional, parameter in _PARAMETER.findall(comment)
        )
        if returned := _RETURNED.search(comment):
            yield name, f"({', '.join(parameters)}) => {returned[1]}"


def _tokens(path: Path) -> Iterator[_Token]:
    """Yield the tokens of a file; comments and blank space are left out."""
    source, at, previous = path.read_text(encoding="utf-8"), 0, ";"
    open_braces: list[int] = []  # of each template that is open: braces within its expression
    while at < len(source):
        match = None
        if source[at] == "`" or (source[at] == "}" and open_braces and open_braces[-1] == 0):
            if source[at] == "}":
                open_braces.pop()
            match, kind = _TEMPLATE.match(source, at + 1), "template"
            if match and match[0].endswith("${"):
                open_braces.append(0)
        elif source[at] == "/" and source[at + 1 : at + 2] not in ("/", "*") and previous in _PRECEDES_REGEX:
            match, kind = _REGEX.match(source, at), "regex"
        else:
            match = _TOKEN.match(source, at)
            kind = (match.lastgroup if match else None) or ""
        if match is None:
            line = source.count("\n", 0, at) + 1
            raise ConfigError(f"line {line} of {path} is no JavaScript that the bundler reads; write it in another way")
        if open_braces and kind == "mark":
            open_braces[-1] += (match[0] == "{") - (match[0] == "}")
        if kind != "space":
            previous = source[at : match.end()]
            yield _Token(kind, previous)
        at = match.end()


def _classified(tokens: Sequence[_Token]) -> list[_Token]:
    """Return the tokens with words by what they are: in an object or a class they may be names of properties."""
    out: list[_Token] = []
    brackets: list[str] = []
    texts = ["", *(token.text for token in tokens), ""]
    for index, token in enumerate(tokens):
        previous, after = texts[index], texts[index + 2]
        inside = brackets[-1] if brackets else "block"
        if token.kind == "mark" and token.text in _CLOSING:
            is_class = "class" in texts[max(0, index - 3) : index + 1]
            kind = "class" if is_class else "object" if previous in _PRECEDES_OBJECT else "block"
            brackets.append(kind if token.text == "{" else token.text)
        elif token.kind == "mark" and token.text in _CLOSING.values():
            brackets.pop()
        kind = token.kind
        if kind == "word":
            begins = previous in ("{", ",", "get", "set", "async")
            is_key = inside == "class" or (inside == "object" and begins and after in (":", "("))
            if previous in (".", "?.") or is_key:
                kind = "property"
            elif inside == "object" and begins and after in (",", "}", "="):
                kind = "shorthand"
            else:
                kind = "reserved" if token.text in _RESERVED else "variable"
        out.append(replace(token, kind=kind))
    return out


def _top_level(tokens: Sequence[_Token]) -> Iterator[str]:
    """Yield the names that are declared outside of brackets."""
    depth = 0
    for previous, token in zip((_Token("", ""), *tokens), tokens, strict=False):
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        if not depth and token.kind == "variable" and previous.text in ("const", "let", "function", "class"):
            yield token.text


def _declared(tokens: Sequence[_Token]) -> set[str]:
    """Return the names of variables that are declared anywhere: by a statement, a pattern, or as parameters."""
    names: set[str] = set()
    ends, starts = {}, []
    for index, token in enumerate(tokens):
        if token.kind == "mark" and token.text in _CLOSING:
            starts.append(index)
        elif token.kind == "mark" and token.text in _CLOSING.values():
            ends[starts.pop()] = index
    for index, token in enumerate(tokens):
        previous, after = (
            tokens[index - 1].text if index else "",
            tokens[index + 1].text if index + 1 < len(tokens) else "",
        )
        if token.kind == "variable" and (previous in ("const", "let", "function", "class") or after == "=>"):
            names.add(token.text)
        if index not in ends:
            continue
        follows = tokens[ends[index] + 1].text if ends[index] + 1 < len(tokens) else ""
        is_parameters = token.text == "(" and follows in ("=>", "{") and previous not in _PRECEDES_CONDITION
        if is_parameters or previous in ("const", "let"):
            names |= set(_in_pattern(tokens[index + 1 : ends[index]]))
    return names


def _in_pattern(tokens: Sequence[_Token]) -> Iterator[str]:
    """Yield the names that a pattern or list of parameters declares; defaults end at the next comma."""
    is_default, depth = False, 0
    for token in tokens:
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        is_default = (is_default or token.text == "=") and token.text != ","
        if not is_default and token.kind in ("variable", "shorthand"):
            yield token.text


def _short_names(tokens: Sequence[_Token], public: Iterable[str]) -> dict[str, str]:
    """Return variable → short name, none of which is `public`; the most frequent ones have the shortest."""
    declared = _declared(tokens)
    uses = Counter(token.text for token in tokens if token.kind in ("variable", "shorthand"))
    kept = {name for name in uses if name not in declared} | _RESERVED | {*public}
    letters = ascii_letters + "_$"
    unused = (
        name
        for length in count(1)
        for first in letters
        for more in product(letters + digits, repeat=length - 1)
        if (name := first + "".join(more)) not in kept
    )
    return dict(zip(sorted(declared, key=lambda name: (-uses[name], name)), unused, strict=False))


def _renamed(tokens: Iterable[_Token], names: Mapping[str, str]) -> list[_Token]:
    """Return the tokens with other names of variables."""
    out = []
    for token in tokens:
        name = names.get(token.text, token.text)
        if token.kind == "variable":
            out.append(replace(token, text=name))
        elif token.kind == "shorthand" and name != token.text:
            out += [_Token("property", token.text), _Token("mark", ":"), _Token("variable", name)]
        else:
            out.append(token)
    return out


def _merged(tokens: Sequence[_Token]) -> Iterator[_Token]:
    """Yield the tokens with one `const` or `let` for neighbors, and without semicolons at the end of blocks."""
    statements = [""]  # the word that each statement around begins with, for those that declare variables
    loops: list[bool] = []  # of each bracket, whether it is that of a loop, after which a semicolon is a statement
    begins = closed_loop = False
    for index, token in enumerate(tokens):
        if begins and token.text == statements[-1] and token.text in ("const", "let"):
            yield _Token("mark", ",")
            begins = False
            continue
        if begins:
            yield _Token("mark", ";")
        begins = False
        if token.kind == "mark" and token.text in _CLOSING:
            loops.append(token.text == "(" and tokens[index - 1].text in ("for", "while"))
            statements.append("")
        elif token.kind == "mark" and token.text in _CLOSING.values():
            closed_loop = loops.pop()
            statements.pop()
        ends_list = index + 1 < len(tokens) and tokens[index + 1].text in ("]", ")", "}")
        if token.text == "," and ends_list and tokens[index - 1].text not in ("[", ","):  # those of holes stay
            continue
        if token.text == ";" and not any(loops[-1:]) and not (tokens[index - 1].text == ")" and closed_loop):
            if index + 1 < len(tokens) and tokens[index + 1].text == "}":
                continue
            begins = True
            continue
        previous = tokens[index - 1].text if index else ";"
        if previous in (";", "{") or (previous == "}" and statements[-1] not in ("const", "let")):
            statements[-1] = token.text
        yield token
    if begins:
        yield _Token("mark", ";")


def _joined(tokens: Iterable[_Token]) -> str:
    """Return the text of tokens, with blanks where two would become one, a line for each statement of the module."""
    out: list[str] = []
    last, depth = ";", 0
    for token in tokens:
        is_word = (last[-1].isalnum() or last[-1] in "_$") and (token.text[0].isalnum() or token.text[0] in "_$")
        is_sign = last[-1] == token.text[0] and last[-1] in "+-/"
        begins = depth == 0 and last in (";", "}") and token.text in ("function", "class", "const", "let")
        out.append("\n" if begins and out else " " if is_word or is_sign else "")
        out.append(token.text)
        last = token.text
        depth += (last in _CLOSING) - (last in _CLOSING.values())
    return "".join(out)
