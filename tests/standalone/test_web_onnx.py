"""ONNX models in browsers: the files that Python writes, to the byte, and one sentence for those that are damaged."""

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

import birdie
from birdie.artifact import container
from birdie.artifact.onnx_export import write_onnx
from birdie.standalone import javascript_decoder
from tests.onnx import zoo

PROGRAM = """
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
const { toOnnx, toOnnxFiles } = await import(process.argv[2]);
const digest = (bytes) => createHash("sha256").update(bytes).digest("hex");
const answers = [];
for (const data of JSON.parse(readFileSync(0, "utf8"))) {
  const buffer = Buffer.from(data, "base64");
  try {
    const files = Object.entries(await toOnnxFiles(buffer));
    if (files.length === 1 && digest(await toOnnx(buffer)) !== digest(files[0][1])) throw new TypeError("they differ");
    answers.push(Object.fromEntries(files.map(([name, bytes]) => [name, digest(bytes)])));
  } catch (error) {
    if (error.constructor !== Error) throw error;
    answers.push(error.message);
  }
}
console.log(JSON.stringify(answers));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def by_node(files: list[bytes], folder: Path) -> list[Any]:
    """Return for each .birdie file name → SHA-256 of the files of its model, or the sentence that refuses it."""
    (folder / "decode.mjs").write_bytes(javascript_decoder())
    (folder / "run.mjs").write_text(PROGRAM)
    listed = json.dumps([base64.b64encode(data).decode() for data in files])
    command = ["node", "run.mjs", (folder / "decode.mjs").as_uri()]
    done = subprocess.run(command, cwd=folder, input=listed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_models_are_those_that_python_writes(tmp_path: Path) -> None:
    files, expected = [], []
    for index, (name, external) in enumerate((name, external) for name in zoo.MODELS for external in (False, True)):
        folder = tmp_path / str(index)
        folder.mkdir()
        path = zoo.write(name, folder / "before", external=external)
        birdie.onnx.save(path, folder / "model.birdie", lossless=index % 3 == 0, effort="fast")
        written = write_onnx(folder / "model.birdie", folder / "after", as_folder=True)
        files.append((folder / "model.birdie").read_bytes())
        expected.append(
            {
                one.relative_to(folder / "after").as_posix(): hashlib.sha256(one.read_bytes()).hexdigest()
                for one in written
            }
        )
    answers = by_node(files, tmp_path)
    assert answers == expected
    assert [[*one] for one in answers] == [[*one] for one in expected]  # the model first


def test_what_is_no_sound_model_is_one_sentence(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    birdie.onnx.save(path, tmp_path / "model.birdie", lossless=True)
    with container.Reader(tmp_path / "model.birdie") as reader:
        fields = json.loads(bytes(reader.metadata))
        (name, *pieces), entries = fields["onnx"][0], [reader.read(one) for one in reader._index]
    plain = tmp_path / "plain.birdie"
    birdie.save({"w": birdie.load(tmp_path / "model.birdie").popitem()[1]}, plain, lossless=True)
    layouts: list[Any] = [
        *([], [[name]], [["other", *pieces]], [[name, *pieces], [name]], [[name, *pieces, 0]], [name], [[]], [None]),
        *([[name, -1, *pieces[1:]]], [[name, 10**9, *pieces[1:]]], [[name, [0, 0, 0], *pieces[1:]]]),
        *([[name, "0", *pieces[1:]]], [[name, [0, 1], *pieces[1:]]], [[name, 0.5, *pieces[1:]]], [5], ["x"]),
    ]
    damaged = [container.to_bytes(entries, json.dumps({**fields, "onnx": one}).encode()) for one in layouts]
    damaged.append(container.to_bytes(entries, json.dumps({**fields, "order": [".", [7] * 99]}).encode()))
    damaged.append(container.to_bytes(entries, json.dumps({**fields, "files": {name: 9}}).encode()))
    answers = by_node([plain.read_bytes(), *damaged], tmp_path)
    assert [answer for answer in answers if not isinstance(answer, str) or len(answer) > 160] == []
