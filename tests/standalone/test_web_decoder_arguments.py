"""A wrong argument of a public function of the decoder for browsers is an Error of one sentence."""

import base64
import json
import shutil
import subprocess
from io import BytesIO

import pytest
import torch

import birdie
from birdie.standalone import DECODER, PROGRAM

RIGHT = (
    *("f(file)", "f(file.slice())", "f(memory)", "f(new DataView(memory))", "f(new Int8Array(memory))", "f(shared)"),
    *("f(new Uint8Array(shared))", "f(Buffer.from(file))", "f(file, undefined)", "f(file, null)", "f(file, {})"),
)
OF_DECODE = (
    *("f(file, { maxBytes: null })", "f(file, { maxBytes: undefined })", "f(file, { maxBytes: 1e9 })"),
    *("f(file, { maxBytes: Infinity })", "f(file, Object.freeze({ maxBytes: 40 }))", "f(file, { maxOperations: 1e9 })"),
    *(
        "f(file, { names: null })",
        "f(file, { names: [] })",
        "f(file, { names: ['a', 'a'] })",
        "f(file, { onProgress() {} })",
    ),
)
NO_BYTES = (
    *(
        "f()",
        "f(null)",
        "f(undefined)",
        "f('text')",
        "f(5)",
        "f(5n)",
        "f(true)",
        "f(Symbol('s'))",
        "f({})",
        "f([1, 2])",
    ),
    *("f({ byteLength: 9 })", "f(() => file)", "f(new Blob([file]))", "f(new Map())"),
    *("f(new ArrayBuffer(0))", "f(new Uint8Array(30))", "f(detached)", "f(detachedView)", "f(new DataView(memory, 8))"),
    *("f({ [Symbol.toStringTag]: 'ArrayBuffer' })", "f(file.subarray(1))", "f(file.subarray(0, 20))"),
)
NO_OPTIONS = (
    *("f(file, 5)", "f(file, 'text')", "f(file, true)", "f(file, Symbol('s'))", "f(file, { maxBytes: NaN })"),
    *(
        "f(file, { maxBytes: -1 })",
        "f(file, { maxBytes: 'x' })",
        "f(file, { maxBytes: 5n })",
        "f(file, { maxBytes: {} })",
    ),
    *("f(file, { maxBytes: Symbol('s') })", "f(file, { maxBytes: [9] })", "f(file, { maxBytes: 39 })"),
    *("f(file, { maxBytes: 0 })", "f(file, { maxOperations: 1 })", "f(file, { maxOperations: '9' })"),
    *("f(file, { names: 'a' })", "f(file, { names: 5 })", "f(file, { names: [5] })", "f(file, { names: ['b'] })"),
    *("f(file, { onProgress: 5 })", "f(file, { names: {} })"),
)
NO_TENSOR = (
    *(
        "f()",
        "f(null)",
        "f(5)",
        "f('text')",
        "f(file)",
        "f({})",
        "f([])",
        "f({ dtype: 'float32' })",
        "f({ data: file })",
    ),
    *("f({ dtype: 'int8', data: new Int8Array(2) })", "f({ dtype: 'float16', data: new Uint8Array(2) })"),
    *("f({ dtype: 'bfloat16', data: [1, 2] })", "f({ dtype: 'float64', data: null })", "f({ dtype: Symbol('s') })"),
    *("f({ dtype: 'constructor', data: file })", "f({ dtype: ['float32'], data: new Float32Array(1) })"),
)
SCRIPT = """
import * as module from SOURCE;
import { readFileSync } from "node:fs";
module.useProgram(readFileSync(PROGRAM));
const file = new Uint8Array(Buffer.from(DATA, "base64"));
const memory = file.slice().buffer;
const shared = new SharedArrayBuffer(file.length);
new Uint8Array(shared).set(file);
const detachedView = file.slice();
const detached = detachedView.buffer;
structuredClone(detached, { transfer: [detached] });
const outcome = async (call) => {
  try {
    await call();
    return "";
  } catch (error) {
    return error.constructor === Error ? error.message : `fault: ${error}`;
  }
};
const f = module[NAME];
const outcomes = [];
for (const call of [CALLS]) outcomes.push(await outcome(call));
console.log(JSON.stringify(outcomes));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def outcomes(name: str, calls: tuple[str, ...]) -> dict[str, str]:
    """Return call of the function → message of its Error; empty if it returns."""
    file = BytesIO()
    birdie.save({"a": torch.arange(10.0)}, file, lossless=True)
    program = SCRIPT.replace("SOURCE", json.dumps(DECODER.as_uri())).replace("NAME", json.dumps(name))
    program = program.replace("PROGRAM", json.dumps(str(PROGRAM)))
    program = program.replace("DATA", json.dumps(base64.b64encode(file.getvalue()).decode()))
    program = program.replace("CALLS", ",".join(f"() => {call}" for call in calls))
    command = ["node", "--input-type=module", "-e", program]
    answers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return dict(zip(calls, answers, strict=True))


@pytest.mark.parametrize(("name", "calls"), [("decode", (*RIGHT, *OF_DECODE))])
def test_right_arguments_are_taken(name: str, calls: tuple[str, ...]) -> None:
    assert {call: message for call, message in outcomes(name, calls).items() if message} == {}


@pytest.mark.parametrize(("name", "calls"), [("decode", (*NO_BYTES, *NO_OPTIONS)), ("toFloat32", NO_TENSOR)])
def test_wrong_arguments_are_one_sentence(name: str, calls: tuple[str, ...]) -> None:
    messages = outcomes(name, calls)
    assert [call for call, message in messages.items() if not 15 < len(message) < 160 or "\n" in message] == []
    assert [message for message in messages.values() if message.startswith("fault") or "undefined," in message] == []


def test_messages_name_the_value() -> None:
    messages = outcomes("decode", (*NO_BYTES, *NO_OPTIONS))
    assert "null" in messages["f(null)"]
    assert '"text"' in messages["f('text')"]
    assert "NaN" in messages["f(file, { maxBytes: NaN })"]
    assert "detached" in messages["f(detached)"]
    assert "detached" in messages["f(detachedView)"]
