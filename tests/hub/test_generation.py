"""A Hugging Face language model in a .birdie file continues a text and answers messages, as its library does."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.cli import build_app, main
from birdie.cli.console import run
from birdie.errors import ConfigError
from birdie.hub import TextModel
from tests.hub.models import write
from tests.hub.test_pipelines import with_tokenizer
from tests.hub.test_pretrained import compress

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a GPT-2 of 32 positions, all of whose tokens are words."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    folder = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=5, n_positions=32, bos_token_id=1, eos_token_id=None
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = with_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return compress(folder, "--lossless")


def answer(capsys: pytest.CaptureFixture[str], *tokens: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["sample", *map(str, tokens), "--device", "cpu", "--json"])
    assert int(ended.value.code or 0) == code
    return json.loads(capsys.readouterr().out)


def test_the_most_likely_tokens_are_those_of_the_library(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, model = birdie.tokenizer(file), birdie.from_pretrained(file)
    (expected,) = model.generate(**words("once upon", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    result = answer(capsys, file, "--prompt", "once upon", "--temperature", 0, "--tokens", 9)
    assert result["text"] == words.decode(expected)
    assert result["tokens"] == 9


def test_a_seed_gives_one_text_and_other_seeds_others(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [answer(capsys, file, "--prompt", "a", "--seed", seed, "--tokens", 20)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    one = answer(capsys, file, "--prompt", "a", "--top-k", 1, "--tokens", 5)
    assert one["text"] == answer(capsys, file, "--prompt", "a", "--temperature", 0, "--tokens", 5)["text"]


def test_text_ends_where_the_model_sees_no_more(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, file, "--prompt", "a time", "--tokens", 200)["tokens"] == 30
    error = answer(capsys, file, "--prompt", "a " * 32, code=1)["error"]
    assert error["type"] == "ConfigError"
    assert "32" in error["message"]


def test_what_is_printed_is_the_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "once", "--temperature", 0, "--tokens", 4)
    result = answer(capsys, file, *flags)
    with pytest.raises(SystemExit):
        main(["sample", str(file), *map(str, flags), "--device", "cpu"])
    assert capsys.readouterr().out == result["text"] + "\n"


def test_a_conversation_goes_through_the_chat_template(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TextModel.open(file)
    user = [{"role": "user", "content": "upon time"}]
    assert model.decode(model.conversation(user)) == "[UNK] upon time a".replace("[UNK] ", "")
    flags = ("--chat", "--temperature", 0, "--tokens", 3)
    one = answer(capsys, file, *flags, "--prompt", "upon time")["messages"]
    monkeypatch.setattr("sys.stdin", io.StringIO("upon time\n\n" + "once a\n" * 5))
    messages = answer(capsys, file, *flags)["messages"]
    assert messages[:2] == one
    assert [message["role"] for message in messages] == ["user", "assistant"] * 6  # the first ones were left out


def test_what_continues_no_text_is_one_sentence(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("vit", tmp_path / "vit")
    image = compress(tmp_path / "vit", "--bits", "6", "--calibrate", "none")
    write("llama", tmp_path / "llama")
    with_tokenizer(tmp_path / "llama")
    plain = compress(tmp_path / "llama", "--bits", "6", "--calibrate", "none")
    birdie.save({"w": torch.ones(4, 4)}, tmp_path / "w.birdie")
    capsys.readouterr()
    for flags, words in (
        ((image,), "image-classification"),
        ((plain, "--chat", "--prompt", "a"), "no chat template"),
        ((plain,), "begins a text"),
        ((file, "--tokenizer", "bytes"), "--tokenizer"),
        ((file, "--prompt", "a", "--top-k", "0"), "top_k is 0"),
        ((tmp_path / "w.birdie",), "birdie GPT"),
        ((tmp_path / "w.birdie", "--chat"), "--chat"),
    ):
        assert words in answer(capsys, *flags, code=1)["error"]["message"]


def test_a_fine_tune_has_its_tokenizer_from_the_base(file: Path, tmp_path: Path) -> None:
    folder = file.with_suffix("")
    model = birdie.from_pretrained(file)
    model.transformer.wte.weight.data += 1e-4
    model.save_pretrained(tmp_path / "tuned")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "tuned" / name).write_bytes((folder / name).read_bytes())
    tuned = compress(tmp_path / "tuned", "--lossless", "--base", str(folder))
    assert "tokenizer.json" in birdie.inspect(tuned).base_files
    opened = TextModel.open(tuned, base=folder)
    assert torch.equal(opened.model.lm_head.weight, model.lm_head.weight)
    assert opened.prompt("once") == [1]
    with pytest.raises(ConfigError, match="base"):
        TextModel.open(tuned)


def test_after_ctrl_c_the_line_of_the_text_has_an_end(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: TextModel, _ids: object, _tokens: int, put: Any, **_: object) -> None:
        put(self.words("once").input_ids[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(TextModel, "generate", interrupted)
    assert run(build_app, ["sample", str(file), "--prompt", "a", "--device", "cpu"]) == 130
    assert capsys.readouterr().out.endswith("once\n")
