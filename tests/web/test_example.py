"""The example that people copy runs in a browser: examples/web, with onnxruntime-web from the registry of npm."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import birdie  # noqa: E402
from birdie.standalone import javascript_decoder  # noqa: E402
from tests.onnx import zoo  # noqa: E402
from tests.web.browser import Tab, chromium  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "web"
SECONDS = 120  # for npm to install

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as its README says to make it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "decode.js").write_bytes(javascript_decoder())
    install = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not reach its registry")
    if done.returncode:
        pytest.skip(f"npm does not install onnxruntime-web: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Address at which the example is served, as `python -m http.server` does, but without caches."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def end_headers(self) -> None:  # the dates of files have seconds, in which a model is replaced
            self.send_header("Cache-Control", "no-store")
            super().end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def shown(tab: Tab, address: str) -> str:
    """Return what the page shows once it is done."""
    tab.open(address)
    tab.wait("/^Error/.test(document.body?.innerText ?? '') || document.getElementById('progress')?.hidden")
    return str(tab.evaluate("document.body.innerText"))


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
def test_a_model_gives_in_the_browser_what_it_gives_in_python(
    external: bool, folder: Path, address: str, tab: Tab
) -> None:
    path = zoo.write("opset 17", folder / "before", external=external)
    birdie.onnx.save(path, folder / "model.birdie", effort="fast")
    text = shown(tab, f"{address}/index.html")
    assert tab.messages == []
    assert f"{(folder / 'model.birdie').stat().st_size} bytes became" in text
    model = birdie.onnx.load(folder / "model.birdie").SerializeToString()
    session = onnxruntime.InferenceSession(model)
    (value,) = session.get_inputs()
    zeros = np.zeros([size if isinstance(size, int) else 1 for size in value.shape], np.float32)
    (expected,) = session.run(None, {value.name: zeros})
    line = next(line for line in text.splitlines() if line.startswith(session.get_outputs()[0].name))
    numbers = [float(number) for number in line.partition("): ")[2].removesuffix(" …").split(", ")]
    np.testing.assert_allclose(numbers, expected.ravel()[: len(numbers)], rtol=1e-5, atol=1e-6)


def test_what_is_wrong_is_shown(folder: Path, address: str, tab: Tab) -> None:
    (folder / "damaged.birdie").write_bytes(b"not a birdie file")
    assert "Error: this is not a .birdie file" in shown(tab, f"{address}/index.html?model=damaged.birdie")
    assert "Error: none.birdie cannot be fetched: 404" in shown(tab, f"{address}/index.html?model=none.birdie")
