"""Numbers instead of sentences in the errors of a packed script, as the sentences take a tenth of it.

    ConfigError(f"depth is {depth}; give 1 or more")  ─►  ConfigError(f"E12 {depth}")

The values of a sentence stay, and `birdie script --messages` writes the sentences by number.
"""

import ast
import re
from collections.abc import Collection, Iterable, Sequence

from birdie import errors


class _Sentence(str):
    """Source of the sentence of an error, which a number will replace."""


def drop_sentences(module: str, body: list[ast.stmt], worded: Collection[str]) -> list[ast.stmt]:
    """Return the statements of a module whose errors have only the values of their sentences, until `number` is called.

    Args:
        worded: modules whose errors keep their sentences.
    """
    return body if module in worded else [_Marker().visit(statement) for statement in body]


def number(trees: Iterable[ast.Module]) -> tuple[str, ...]:
    """Number the errors in `trees`, in place, from E1, and return their sentences by number, as source."""
    sentences: list[str] = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, _Sentence):
                sentences.append(str(node.value))
                node.value = f"E{len(sentences)}"
    return tuple(sentences)


def table(sentences: Iterable[str]) -> str:
    """Return the numbers of errors and their sentences as text, one a line."""
    return "".join(f"E{index} {sentence}\n" for index, sentence in enumerate(sentences, 1))


def explained(error: str, sentences: Sequence[str]) -> str:
    """Return an error of a packed script, followed by its sentence if it is a number."""
    match = re.match(r"E(\d+)\b", error)
    if match is None or not 1 <= int(match[1]) <= len(sentences):
        return error
    return f"{error}, which stands for {sentences[int(match[1]) - 1]}"


class _Marker(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and hasattr(errors, node.func.id) and len(node.args) == 1:
            text = node.args[0]
            if isinstance(text, ast.JoinedStr):
                values = [part for part in text.values if isinstance(part, ast.FormattedValue)]
                plain = [part for part in values if isinstance(part.value, ast.Name | ast.Attribute)]
                parts: list[ast.expr] = [part for value in plain for part in (ast.Constant(" "), value)]
                sentence = ast.Constant(_Sentence(ast.unparse(text)))
                node.args = [ast.JoinedStr([sentence, *parts]) if parts else sentence]
            elif isinstance(text, ast.Constant):
                node.args = [ast.Constant(_Sentence(text.value))]
        return self.generic_visit(node)
