"""Code bytes: every file that an entry point may load is counted once, whether or not it is loaded."""

import subprocess
import sys
from pathlib import Path

from birdie.artifact.codes import SCHEMES
from birdie.compress import registry
from birdie.standalone.code_size import PACKAGE, code_bytes, source_files


def test_the_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import birdie.artifact.container\n")
    files = source_files(script)
    assert files == tuple(sorted(set(files)))
    assert script.resolve() in files
    assert code_bytes(script) == sum(path.stat().st_size for path in files)


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "def later():\n    from birdie.gpt.score.clock import EvaluationClock\n    return EvaluationClock\n"
    )
    assert {script.resolve(), PACKAGE / "gpt" / "score" / "clock.py"} <= set(source_files(script))


def test_imports_for_types_alone_do_not_count(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("if TYPE_CHECKING:\n    from birdie.gpt.score.clock import EvaluationClock\n")
    assert source_files(script) == (script.resolve(),)


def test_imports_inside_functions_may_be_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    import birdie.errors, birdie.gpt.data.caseops\nimport birdie.gpt.model.layers\n")
    names = {path.stem for path in source_files(script, follow=lambda name: name == "birdie.errors")}
    assert {"errors", "layers"} <= names
    assert "caseops" not in names


def test_modules_of_a_listed_package_count() -> None:
    """Schemes are found by listing their package; whoever can decode a file can load all of them."""
    names = SCHEMES.values()
    modules = {Path(str(sys.modules[registry.decoder(name).layout.__module__].__file__)) for name in names}
    assert len(modules) == len(names)
    assert modules <= set(source_files(PACKAGE / "artifact" / "loading.py"))


def test_everything_that_is_loaded_is_counted() -> None:
    """The command line loads its commands by name."""
    code = (
        "import sys; from birdie.cli import build_app; build_app(['train', '--help']);"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('birdie') and m.__file__), sep='\\n')"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded) > 15
    assert set(map(Path, loaded)) <= {
        *source_files(PACKAGE / "cli" / "__init__.py"),
        *source_files(PACKAGE / "cli" / "train.py"),
    }
