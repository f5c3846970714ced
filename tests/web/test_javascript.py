"""Laws of the bundler of JavaScript modules: what it writes computes the same, and it says what it cannot read."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from birdie.errors import ConfigError
from birdie.web.javascript import bundle

MODULES = {
    "main.js": """
        // A comment with 'quotes', `templates` and /slashes/.
        import { SIZE, Table, sum } from "./parts/table.js";
        import { swap } from "./parts/swap.js";
        const offset = 1; /* the parts have one, too */
        const { a: first, b, ...rest } = { a: 1, b: 2, c: 3, if: 4 };
        export function run({ scale = SIZE } = {}, ...more) {
          const table = new Table([1, 2, 3]);
          const text = `${scale}: ${more.map((one) => `<${one}>`).join()} \\`{${{ b }.b}}`;
          let total = 0;
          for (const value of table) total += value;
          for (let i = 0; i < 3; total += i++);
          do total -= offset; while (total > 5 && !/[/"]/.test(text));
          const [x, y] = swap(first, b);
          const ratio = total / x / y;
          if (ratio > 2) return { text, total, "x-y": x - -y, rest };
          const [, second, , fourth] = [1, 2, 3, 4,];
          const holes = [, 1, , ].length + second + fourth;
          return { text, ratio, sum: sum(table.values, (u) => u ** 2), size: table.size, rest, holes, };
        }
        export { swap };
    """,
    "parts/table.js": """
        import { swap } from "./swap.js";
        const offset = 10;
        let made = 0;
        export const SIZE = 3;
        export class Table {
          constructor(values) { this.values = values; made++; }
          get size() { return this.values.length + made; }
          *[Symbol.iterator]() { yield* this.values; }
        }
        export const sum = (values, of) => values.reduce((total, value) => total + of(value), offset) + swap(1, 2)[0];
    """,
    "parts/swap.js": "const offset = 0;\nexport function swap(a, b) { return [b + offset, a]; }\n",
}
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def write(folder: Path) -> Path:
    """Write the modules; return the path of the first."""
    (folder / "parts").mkdir()
    for name, source in MODULES.items():
        (folder / name).write_text(source)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder / "main.js"


def result(module: Path) -> object:
    """Return what the module computes."""
    program = (
        f"import {{ run, swap }} from {json.dumps(module.as_uri())};"
        "console.log(JSON.stringify([run(), run({ scale: 7 }, 'a', 'b'), swap(1, 2)]));"
    )
    command = ["node", "--input-type=module", "-e", program]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_bundle_computes_what_its_modules_do(tmp_path: Path) -> None:
    entry = write(tmp_path)
    (tmp_path / "bundle.js").write_text(bundle(entry))
    assert result(tmp_path / "bundle.js") == result(entry)


def test_a_bundle_is_short_and_without_comments(tmp_path: Path) -> None:
    text = bundle(write(tmp_path))
    assert len(text) < 0.6 * sum(map(len, MODULES.values()))
    assert "comment" not in text
    assert not re.search(r"\b(import|offset|total|ratio)\b(?!:)", text.replace("total:", ""))
    assert bundle(tmp_path / "main.js") == text


def test_what_it_cannot_read_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.js").write_text('const a = 1;\nconst b = "open;\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*broken\.js"):
        bundle(tmp_path / "broken.js")


def test_exported_functions_keep_the_types_of_their_comments(tmp_path: Path) -> None:
    (tmp_path / "typed.js").write_text(
        "/**\n * @typedef {object} Pair\n * @property {number} first\n */\n"
        "/**\n * @param {number} first\n * @param {{ by?: number }} [options] factor\n * @returns {Pair}\n */\n"
        "export function pair(first, { by = 1 } = {}) { return { first: first * by }; }\n"
    )
    text = bundle(tmp_path / "typed.js")
    assert "/** @type {(first: number, options?: { by?: number }) => Pair} */\nexport const pair=" in text
    assert "@typedef {object} Pair\n * @property {number} first" in text
