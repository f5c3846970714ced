"""Odd metadata have one verdict in birdie, the one-file decoder and the decoder for browsers."""

import json
import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact import container, metadata, repack
from birdie.errors import ArtifactError, ConfigError
from birdie.standalone import decoder
from tests.hostile import odd_metadata, targets
from tests.hostile.seeds import Seed
from tests.hostile.webassembly import Decoder

LIMIT = 1 << 20

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def node() -> Any:
    with Decoder() as process:
        yield process


@pytest.fixture(scope="module")
def seed() -> Seed:
    """A file with tied tensors, a copy, an order, and the caller's metadata."""
    weight, file = torch.arange(400.0).sin(), BytesIO()
    state = {"z": weight, "a": weight, "b": weight.clone(), "c": weight.clone(), "d.x": torch.ones(2)}
    birdie.save(state, file, lossless=True, metadata={"k": [1, {"x": 2.5}]})
    seed = Seed(file.getvalue(), {})
    assert seed.reader.fields.keys() >= {"copies", "order", "metadata"}
    return seed


def verdicts(entries: Any, text: bytes, node: Decoder) -> tuple[bool, ...]:
    """Return whether birdie, the one-file decoder and WebAssembly decode a file with such metadata."""
    data = container.to_bytes(entries, text)
    accepted = []
    for decode in (
        lambda: birdie.load(data, max_bytes=LIMIT, workers=1),
        lambda: decoder.load(data, max_bytes=LIMIT),
        lambda: node.tensors(data, LIMIT),
    ):
        try:
            decode()
            accepted.append(True)
        except ArtifactError:
            accepted.append(False)
    return tuple(accepted)


SOUND = (
    *("", "{}", " {} ", '{"budget":0}', '{"budget":-0}', '{"budget":' + "9" * 4300 + "}", '{"unknown":[1.5]}'),
    *('{"copies":[]}', '{"copies":[0,1]}', '{"copies":[-0]}', '{"metadata":{"a":1e308}}', '{"metadata":{"a":1e-400}}'),
    *('{"metadata":{"a":"\\ud800"}}', '{"__proto__":{"a":1}}', '{"files":{"a":3}}', '{"tree":null}', '{"link":{}}'),
    *('{"state":{"versions":{"a":2}}}', '{"base":{"inside":false}}', '{"x":' + "[" * 499 + "]" * 499 + "}"),
    '{"onnx":[]}',
)
WRONG = (
    *("[]", "7", "null", "{", "{}{}", "{}\0", "\ufeff{}", '{"a":NaN}', '{"a":-Infinity}', '{"a":1e400}', '{"a":01}'),
    *('{"budget":null}', '{"budget":1.0}', '{"budget":1e3}', '{"budget":-1}', '{"budget":true}', '{"budget":"1"}'),
    *('{"a":1,"a":1}', '{"a":{"b":1,"\\u0062":2}}', '{"a":' + "9" * 4301 + "}", '{"a":"\t"}'),
    *('{"copies":null}', '{"copies":[0.0]}', '{"copies":[true]}', '{"copies":[1,0]}', '{"copies":[0,0]}'),
    *('{"copies":[-1]}', '{"copies":[9007199254740992]}', '{"copies":{}}', '{"copies":"0"}', '{"metadata":null}'),
    *('{"schemes":null}', '{"schemes":["x"]}', '{"schemes":{"128":5}}', '{"files":{"a":-1}}', '{"files":{"a":1.0}}'),
    *('{"files":{"a":281474976710657}}', '{"files":{"a":' + "9" * 4300 + "}}"),
    *('{"order":null}', '{"order":[]}', '{"order":[5]}', '{"order":["123456789"]}', '{"order":[".",[1.0]]}'),
    *('{"order":[".",1]}', '{"state":null}', '{"state":{"versions":{"a":1.0}}}', '{"state":{"extra":[]}}'),
    *('{"tree":{}}', '{"link":null}', '{"base":{"inside":1}}', '{"base":{"of":null}}', '{"base":{"names":{"a":1}}}'),
    *('{"x":' + "[" * 500 + "]" * 500 + "}", '{"onnx":null}', '{"onnx":{}}'),
)


@pytest.mark.parametrize(("texts", "verdict"), [(SOUND, True), (WRONG, False)], ids=["sound", "wrong"])
def test_metadata_have_the_verdict_of_the_format(
    texts: tuple[str, ...], verdict: bool, seed: Seed, node: Decoder
) -> None:
    results = {text[:60]: verdicts(seed.entries, text.encode(), node) for text in texts}
    assert {text: result for text, result in results.items() if result != (verdict,) * 3} == {}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_metadata_are_utf8_alone(encoding: str, seed: Seed, node: Decoder) -> None:
    assert verdicts(seed.entries, '{"budget":1}'.encode(encoding), node) == (False,) * 3
    assert verdicts(seed.entries, b'{"a":"\xed\xa0\x80"}', node) == (False,) * 3


def test_odd_metadata_have_one_verdict(seed: Seed, tmp_path: Path) -> None:
    require_one_verdict(seed, 150, tmp_path)


@pytest.mark.nightly
def test_much_odd_metadata_have_one_verdict(seed: Seed, tmp_path: Path) -> None:
    require_one_verdict(seed, 20_000, tmp_path)


def require_one_verdict(seed: Seed, count: int, folder: Path) -> None:
    """Let three decoders decode files with odd metadata; fail where they differ in verdict or bits."""
    accepted, fields = 0, json.loads(bytes(seed.reader.metadata))
    with targets.webassembly():
        for index in range(count):
            data = container.to_bytes(seed.entries, odd_metadata.odd(fields, random.Random(index)))
            try:
                targets.decode_artifact(seed, data, folder / "odd.birdie")
                accepted += 1
            except ArtifactError:
                pass
    assert count / 10 < accepted < count / 2


def test_metadata_that_readers_refuse_are_not_written() -> None:
    nested: list[Any] = []
    for _ in range(metadata.MAX_DEPTH):
        nested = [nested]
    with pytest.raises(ConfigError, match="deeper"):
        metadata.to_bytes({"a": nested})
    assert metadata.parse(metadata.to_bytes({"a": "[" * 2000 + '"'}), "x.birdie", aliases=0)


def test_a_tree_of_views_is_not_decoded_here(node: Decoder) -> None:
    file, memory = BytesIO(), torch.arange(30.0)
    repack.save_object({"a": memory, "b": memory[3:9]}, file)
    with pytest.raises(ArtifactError, match="views of tensors"):
        node.tensors(file.getvalue(), LIMIT)
