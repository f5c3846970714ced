"""The page of a model: its JavaScript computes what Python computes, and the page runs in a browser, alone.

Laws of the JavaScript modules run in node, those of the page in headless Chromium (`make browser` installs it on
Debian); where one is not installed, its tests are skipped.
"""

import hashlib
import io
import json
import random
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from birdie.artifact.saving import save
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.gpt.data.caseops import OPERATORS
from birdie.gpt.data.tokenizer import (
    ByteTokenizer,
    CaseOpsTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_caseops,
    train_sentencepiece,
)
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.sampling import generate
from birdie.gpt.run.evaluation import load_gpt
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.train.settings import TrainSettings
from birdie.standalone import PROGRAM
from birdie.web import model_page as pages
from birdie.web.model_page import Page, model_page, model_recipe
from birdie.web.model_plan import model_plan
from birdie.web.pieces import tokenizer_description
from birdie.web.units import BYTE_ORDER_MARK, text_of
from scripts import demo_page
from tests.gpt.data.published_vocabulary import published
from tests.gpt.model.technique_table import ALL, COMBINATIONS, SMALL, randomized, tokens, with_settings
from tests.web.browser import Tab, chromium

ROOT = Path(__file__).resolve().parents[2]
WEB = Path(pages.__file__).parent
CONTEXT = 64


def in_node(program: str, data: Any) -> Any:
    """Return what the body of a function in JavaScript returns for `data`, where `module(name)` imports a module."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    source = (
        'import fs from "node:fs"; const data = JSON.parse(fs.readFileSync(0, "utf8"));'
        f"const module = (name) => import({json.dumps(WEB.as_uri())} + '/' + name);"
        f"const f = async () => {{ {program} }}; process.stdout.write(JSON.stringify(await f()));"
    )
    done = subprocess.run(
        [node, "--input-type=module", "--eval", source],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOGITS = """
    const { Model } = await module("model.js");
    return data.map(({ plan, ids, tensors }) => {
      const decoded = Object.entries(tensors).map(([name, values]) => {
        return [name, { dtype: "float32", shape: [values.length], data: Float32Array.from(values) }];
      });
      const model = new Model(plan, Object.fromEntries(decoded));
      return ids.map((id) => Array.from(model.step(id)));
    });
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([*COMBINATIONS, {}], id="combined"),
        pytest.param([*ALL.values()], id="each", marks=pytest.mark.nightly),
    ],
)
def test_logits_of_every_technique_equal_those_of_python(settings: list[dict[str, Any]]) -> None:
    """The same function of the tokens; where they are more than the context, that of Python's KV cache."""
    ids = tokens(1, 16)
    cases = [(randomized(with_settings(change)).eval(), context) for change in settings for context in (16, 5)]
    answer = in_node(
        LOGITS,
        [
            {
                "plan": model_plan(model.config, context),
                "ids": ids[0].tolist(),
                "tensors": {name: weight.flatten().tolist() for name, weight in model.state_dict().items()},
            }
            for model, context in cases
        ],
    )
    for (model, context), logits in zip(cases, answer, strict=True):
        with torch.no_grad():
            expected = model(ids)[0] if context == 16 else cached_logits(model, ids, context)
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)


def cached_logits(model: GPT, ids: torch.Tensor, context: int) -> torch.Tensor:
    cache = Cache(model, 1, context)
    return torch.cat([cache(ids[:, i : i + 1])[0] for i in range(ids.shape[1])])


LINES = ["Hello World, how are you?", "def f(self): return self.value", "Élan naïve façade 1234"]


def trained(**changes: Any) -> SentencePieceTokenizer:
    """Return a small tokenizer with other settings than those of birdie."""
    model = io.BytesIO()
    settings: dict[str, Any] = {"model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2} | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 9), model_writer=model, vocab_size=70, **settings
    )
    return SentencePieceTokenizer(model.getvalue())


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "birdie's": lambda: train_sentencepiece(LINES * 9, 300),
    "CaseOps": lambda: train_caseops(LINES * 9, 300),
    "the challenge's": lambda: published(LINES * 9, 300),
    "the challenge's CaseOps": lambda: CaseOpsTokenizer(published(LINES * 9, 300, OPERATORS)),
    "NFKC, spaces stay": lambda: trained(normalization_rule_name="nfkc", remove_extra_whitespaces=False),
    "no rule, a symbol": lambda: trained(normalization_rule_name="identity", user_defined_symbols=["self", "<a>"]),
}
ALPHABETS = (
    "abcdefghij      ABC.,\n\t0123 self <a>",
    "éàüñçß—…“”€",
    "가각힣ㄱㅏㅑ\u1100\u1161\u11a8ﾡￂ",
    "\u0301\u0300\u0308\u0323\u0327\u1ebf",
    "\u2581\u3000\u00a0\u200b\ufeff\ufffd\x7f\x01\0",
    "ﬁ①㎏ﷺﾊﾟｶﾞ",
    "\ue001\ue002\ue003\ue004",
)


def texts(seed: int, count: int) -> list[str]:
    """Return random texts of characters that normalization changes, and of any characters."""
    source = random.Random(seed)

    def character(alphabets: tuple[str, ...]) -> str:
        if alphabets:
            return source.choice(source.choice(alphabets))
        code = source.randrange(source.choice((0x80, 0x3000, 0x10000, 0x110000)))
        return chr(code) if not 0xD800 <= code <= 0xDFFF else "x"

    kinds = ALPHABETS[:1], ALPHABETS[:2], ALPHABETS, ()
    return ["", *("".join(character(source.choice(kinds)) for _ in range(source.randrange(40))) for _ in range(count))]


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokens_and_texts_equal_those_of_python(build: Any) -> None:
    tokenizer: Tokenizer = build()
    source = random.Random(0)
    inputs = texts(1, 1500)
    lists = [[source.randrange(tokenizer.vocab_size) for _ in range(source.randrange(30))] for _ in range(1000)]
    program = """
        const { createTokenizer } = await module("tokenizer.js");
        const tokenizer = createTokenizer(data.description);
        return [data.texts.map((text) => tokenizer.encode(text)), data.lists.map((ids) => tokenizer.decode(ids))];
    """
    ids, decoded = in_node(program, {"description": tokenizer_description(tokenizer), "texts": inputs, "lists": lists})
    assert ids == [encoded.tolist() for encoded in tokenizer.encode_batch(inputs)]
    assert decoded == [tokenizer.decode(row) for row in lists]


def test_the_table_of_normalization_takes_a_hundredth_of_its_bytes() -> None:
    tokenizer = published(LINES * 9, 300)
    description = json.dumps(tokenizer_description(tokenizer), ensure_ascii=False).encode()
    assert len(tokenizer.model_bytes) > 240_000
    assert len(description) < 24_000


ODD_TOKENIZERS = {
    "unigram": ({"model_type": "unigram"}, "type bpe"),
    "case folding": ({"normalization_rule_name": "nfkc_cf"}, "nfkc_cf"),
    "suffixes": ({"treat_whitespace_as_suffix": True}, "end of words"),
}


@pytest.mark.parametrize(("changes", "reason"), ODD_TOKENIZERS.values(), ids=ODD_TOKENIZERS)
def test_a_tokenizer_without_javascript_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tokenizer_description(trained(**changes))


def all_units() -> bytes:
    """Return every pair of bytes once, in random order, and one byte more."""
    units = np.random.default_rng(0).permutation(1 << 16).astype("<u2")
    return units.tobytes() + b"\x0d"


@pytest.mark.parametrize("data", [b"", b"\0", b"<", bytes(5), b"\r\0" * 40, all_units()], ids=len)
def test_bytes_come_back_from_their_characters(data: bytes) -> None:
    text = text_of(data)
    assert not re.search("[\0\r<\ud800-\udfff]", text)
    program = """
        const { bytesOf } = await module("units.js");
        return Array.from(bytesOf(data.text, data.length));
    """
    assert bytes(in_node(program, {"text": text, "length": len(data)})) == data


def test_bytes_as_characters_take_half_a_percent_more() -> None:
    data = np.random.default_rng(1).bytes(450_000)
    assert 2 * len(text_of(data)) < 1.005 * len(data)


RECIPE = Recipe(
    data=DataSettings(tokenizer="bytes"),
    model=replace(SMALL, vocab_size=260, smear="gated", bigram_vocab_size=17, bigram_dim=8, skip_gates=True),
    train=TrainSettings(train_batch_tokens=2 * CONTEXT, train_seq_len=CONTEXT, accumulation=1),
)


def write_model(path: Path, recipe: Recipe = RECIPE, scheme: Any = None, **metadata: Any) -> Path:
    values = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None} | metadata
    target: dict[str, Any] = {"bits": 5} if scheme is None else {"scheme": scheme}
    save(randomized(recipe.model), path, effort="fast", metadata=values, **target)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT over bytes."""
    return write_model(tmp_path_factory.mktemp("model") / "model.birdie")


def page_of(file: Path, **changes: Any) -> Page:
    recipe = model_recipe(file)
    settings: dict[str, Any] = {"title": "a page", "temperature": 0.0, "tokens": CONTEXT, **changes}
    return model_page(file, recipe, load_tokenizer(recipe.data.tokenizer), **settings)


def test_logits_of_the_decoded_file_equal_those_of_python(file: Path) -> None:
    model, recipe, _ = load_gpt(file, torch.device("cpu"))
    ids = torch.tensor(
        [[1, *ByteTokenizer().encode("def f(x): return [y for y in x if y is not None and y.value > 0]").tolist()]]
    )
    program = """
        const { decode, useProgram } = await module("../standalone/javascript/decoder.js");
        const { Model } = await module("model.js");
        useProgram(fs.readFileSync(data.program));
        const model = new Model(data.plan, await decode(Uint8Array.from(data.file)));
        return data.ids.map((id) => Array.from(model.step(id)));
    """
    answer = in_node(
        program,
        {
            "program": str(PROGRAM),
            "file": list(file.read_bytes()),
            "plan": model_plan(recipe.model, CONTEXT),
            "ids": ids[0, :CONTEXT].tolist(),
        },
    )
    with torch.no_grad():
        np.testing.assert_allclose(answer, model(ids[:, :CONTEXT])[0].numpy(), atol=1e-3)


def test_the_same_model_gives_the_same_page_and_the_parts_add_up(file: Path) -> None:
    page = page_of(file, prompt="déf <b>&", title="<i>")
    assert page.data == page_of(file, prompt="déf <b>&", title="<i>").data
    assert sum(page.parts.values()) == len(page.data)
    assert page.parts["weights"] == file.stat().st_size
    text = page.data.removeprefix(BYTE_ORDER_MARK).decode("utf-16-le")
    assert f'<body data-bytes="{len(page.data):9}">' in text
    assert "<title>&lt;i&gt;</title>" in text
    assert "déf &lt;b&gt;&amp;</textarea>" in content_of(text)["body"]


def content_of(page: str) -> dict[str, Any]:
    """Return what a page holds in compressed form."""
    match = re.search(r'id="content" data-bytes="(\d+)">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    program = 'return Array.from((await module("units.js")).bytesOf(data[1], Number(data[0])));'
    content: dict[str, Any] = json.loads(zlib.decompress(bytes(in_node(program, match.groups()))))
    return content


def other_model(folder: Path, **changes: Any) -> Path:
    return write_model(folder / "other.birdie", replace(RECIPE, **changes))


def test_models_that_a_page_cannot_run_are_refused_by_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.birdie"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ArtifactError, match="fails its checksum"):
        page_of(damaged)
    plain = tmp_path / "plain.birdie"
    save({"weight": torch.ones(2, 2)}, plain)
    with pytest.raises(ArtifactError, match="does not hold a birdie GPT"):
        page_of(plain)
    with pytest.raises(ConfigError, match=r"'blocks.0.mlp.fc.weight' of .* has the scheme spectral"):
        page_of(write_model(tmp_path / "spectral.birdie", scheme=[("blocks.0.mlp.fc.weight", "spectral")]))
    with pytest.raises(ConfigError, match="'linear'"):
        model_plan(replace(SMALL, attention="linear"), CONTEXT)
    with pytest.raises(ConfigError, match="more than the 100,000,000 numbers"):
        page_of(other_model(tmp_path, train=replace(RECIPE.train, train_seq_len=1 << 20, train_batch_tokens=1 << 20)))
    with pytest.raises(DataError, match="trained with tokenizer"):
        page_of(write_model(tmp_path / "sp.birdie", tokenizer={"kind": "sentencepiece", "sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="260 ids, but the model 50"):
        page_of(other_model(tmp_path, model=replace(RECIPE.model, vocab_size=50)))
    monkeypatch.setattr(pages, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than the 1,000 that a page holds"):
        page_of(file)


def test_the_command_writes_a_page_of_a_file_or_a_run_folder(file: Path, tmp_path: Path, capsys: Any) -> None:
    def command(code: int, *arguments: str | Path) -> dict[str, Any]:
        assert run(build_app, ["page", *map(str, arguments), "--json"]) == code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    target = tmp_path / "a page.html"
    answer = command(0, file, "-o", target, "--prompt", "x")
    assert (answer["bytes"], answer["address"]) == (target.stat().st_size, target.as_uri())
    for name in ("run", "demo/run"):  # in a run folder, and in that of `birdie demo`
        (tmp_path / name).mkdir(parents=True)
        shutil.copy(file, tmp_path / name / "model.birdie")
    written = target.read_bytes()
    assert command(0, tmp_path / "run", "-o", target, "--prompt", "x")["bytes"] == len(written)
    assert command(0, tmp_path / "demo", "-o", target, "--prompt", "x")["bytes"] == len(written)
    assert target.read_bytes() == written
    (tmp_path / "text.html").write_text("<!doctype html>mine")
    (tmp_path / "empty").mkdir()
    for arguments, part in [
        ((tmp_path / "empty", "-o", target), "no model.birdie"),
        ((tmp_path / "none.birdie", "-o", target), "none.birdie"),
        ((file, "-o", tmp_path / "text.html"), "not a page of birdie"),
        ((file, "-o", file), "would destroy"),
        ((file, "-o", target, "--temperature", "3"), "from 0 to 2"),
        ((file, "-o", target, "--tokens", "0"), "from 1 to 10,000"),
        ((file, "-o", target, "--tokenizer", "no.model"), "no.model"),
        ((file, "-o", target, "--prompt", "\udcff"), "the prompt has bytes that are no UTF-8"),
    ]:
        assert part in command(1, *arguments)["error"]["message"]
    assert target.read_bytes() == written


def test_the_front_page_of_the_site_shows_the_demo_if_there_is_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = (ROOT / "docs" / "index.md").read_text("utf-8")
    monkeypatch.setattr(demo_page, "FOLDER", tmp_path)
    assert "iframe" not in demo_page.on_page_markdown(front)
    demo_page.on_post_build({"site_dir": str(tmp_path)})
    assert not (tmp_path / demo_page.PAGE).exists()
    (tmp_path / "run").mkdir()
    shutil.copy(file, tmp_path / "run" / "model.birdie")
    assert f'<iframe src="{demo_page.PAGE}"' in demo_page.on_page_markdown(front)
    demo_page.on_post_build({"site_dir": str(tmp_path)})
    assert (tmp_path / demo_page.PAGE).read_bytes().startswith(BYTE_ORDER_MARK)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A tab of headless Chromium."""
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that calls every page UTF-8, as many do, and the paths that were requested."""
    paths: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {".html": "text/html; charset=utf-8"}  # noqa: RUF012  as the base class has it

        def log_message(self, *_: Any) -> None:
            paths.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def open_page(tab: Tab, address: str, state: str = "Ready") -> None:
    tab.requests.clear()
    tab.messages.clear()
    tab.open(address)
    tab.wait(f"document.getElementById('state')?.textContent.startsWith({json.dumps(state)})")


def of(name: str, part: str = "textContent") -> str:
    return f"document.getElementById({name!r}).{part}"


def test_a_browser_gives_back_every_byte_whatever_the_server_says(tab: Tab, tmp_path: Path) -> None:
    data = all_units()
    units = (WEB / "units.js").read_text("utf-8").replace("export ", "")
    page = f"""<!doctype html><link rel="icon" href="data:,"><p id="state"></p>
        <script id="data" type="text/plain">{text_of(data)}</script>
        <script>{units}</script><script>{of("state")} = "Ready"</script>"""
    (tmp_path / "bytes.html").write_bytes(BYTE_ORDER_MARK + page.encode("utf-16-le"))
    digest = f"""crypto.subtle.digest("SHA-256", bytesOf({of("data")}, {len(data)}))
        .then((hash) => Array.from(new Uint8Array(hash)))"""
    with served(tmp_path) as (address, _):
        open_page(tab, f"{address}/bytes.html")
        assert bytes(tab.evaluate(digest)) == hashlib.sha256(data).digest()


def test_the_page_generates_what_python_generates_and_asks_for_nothing(tab: Tab, file: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(page_of(file, prompt="def f").data)
    model, _, _ = load_gpt(file, torch.device("cpu"))
    tokenizer = ByteTokenizer()
    ids = [1, *tokenizer.encode("def f").tolist()]
    output = []
    for token in generate(model, torch.tensor(ids), CONTEXT - len(ids), temperature=0, context=CONTEXT):
        if token == 1:
            break
        output.append(token)
    with served(tmp_path) as (address, paths):
        open_page(tab, f"{address}/page.html")
        tab.evaluate(f"{of('tokens', 'value')} = {CONTEXT - len(ids)}")
        tab.evaluate(of("prompt", "focus()"))
        tab.press("Enter", 13, "\r")
        tab.wait(f"{of('state')}.startsWith('Done')")
        shown = tab.evaluate(of("text"))
        assert tab.messages == []
        assert tab.evaluate("fetch('/other').catch((error) => error.name)") == "TypeError"  # its policy forbids it
        assert paths == ["/page.html"]
    assert shown == tokenizer.decode([*ids, *output])
    assert [address for address in tab.requests if not address.startswith("blob:")] == [f"{address}/page.html"]


@pytest.fixture
def opened(tab: Tab, file: Path, tmp_path: Path) -> Tab:
    """A tab with the page of the tiny model, opened as a file."""
    (tmp_path / "page.html").write_bytes(page_of(file).data)
    open_page(tab, (tmp_path / "page.html").as_uri())
    return tab


def test_escape_stops_a_generation_at_once(opened: Tab) -> None:
    opened.evaluate(f"{of('tokens', 'value')} = 10000; {of('start', 'click()')}")
    opened.wait(of("written"))
    opened.press("Escape", 27)
    shown = opened.evaluate(of("written"))
    assert opened.evaluate(of("state")) == "Stopped"
    assert opened.evaluate(f"new Promise(done => setTimeout(() => done({of('written')}), 100))") == shown
    opened.evaluate(f"{of('tokens', 'value')} = 3; {of('start', 'click()')}")
    opened.wait(f"{of('state')}.startsWith('Done')")
    assert opened.evaluate(of("state")).endswith("3 tokens")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (390, True), (320, True)])
def test_nothing_is_wider_than_the_window(opened: Tab, width: int, is_phone: bool, is_dark: bool) -> None:
    opened.resize(width, 844, is_phone=is_phone, is_dark=is_dark)
    opened.evaluate(f"{of('written')} = 'x'.repeat(999)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = opened.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", color))) for color in (ink, paper)]
    assert (brightness[0] > brightness[1]) == is_dark


def test_every_control_has_a_name_and_the_text_is_announced(opened: Tab) -> None:
    tree = opened.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "slider", "spinbutton", "button", "log", "status", "table"}
    names = {
        node["role"]["value"]: node["name"]["value"] for node in tree if node.get("role", {}).get("value") in roles
    }
    assert names.keys() == roles
    assert {"textbox": "Prompt", "spinbutton": "Tokens", "log": "Generated text"}.items() <= names.items()
    assert names["slider"].startswith("Temperature")
    assert opened.evaluate(of("text", "ariaLive")) == "polite"


def test_a_damaged_page_says_what_is_wrong(tab: Tab, file: Path, tmp_path: Path) -> None:
    data = page_of(file).data
    text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-16-le")
    start = text.index(text_of(file.read_bytes()))
    (tmp_path / "model.html").write_bytes(
        BYTE_ORDER_MARK + (text[: start + 30] + text[start + 31 :]).encode("utf-16-le")
    )
    (tmp_path / "utf8.html").write_text(text, "utf-8")
    for name, says in (("model", "characters of data where"), ("utf8", "but it is UTF-16")):
        open_page(tab, (tmp_path / f"{name}.html").as_uri(), "Error")
        assert says in tab.evaluate(of("state"))
