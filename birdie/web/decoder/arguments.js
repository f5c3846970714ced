/** Arguments of the public functions: a wrong one is an Error of one sentence. */

import { fail } from "./bytes.js";

/**
 * Return a value as a message has it.
 * @param {unknown} value
 */
function described(value) {
  if (typeof value === "string") return JSON.stringify(value.slice(0, 40));
  return Object(value) === value || typeof value === "symbol" ? `of kind ${kindOf(value)}` : `${value}`;
}

/**
 * Return the name of a value's kind: "ArrayBuffer", "Uint8Array", "Null", …
 * @param {unknown} value
 */
function kindOf(value) {
  return Object.prototype.toString.call(value).slice(8, -1);
}

/**
 * Return the bytes of a buffer or view; of shared memory, which others may change, a copy.
 * @param {unknown} buffer
 */
export function bytesOf(buffer) {
  const view = ArrayBuffer.isView(buffer) ? buffer : undefined;
  const memory = view ? view.buffer : buffer;
  const kind = kindOf(memory);
  if (kind !== "ArrayBuffer" && kind !== "SharedArrayBuffer") {
    fail(`what is to be decoded is ${described(buffer)}; give an ArrayBuffer or Uint8Array, the bytes of a file`);
  }
  let bytes = new Uint8Array(0);
  try {
    bytes = new Uint8Array(/** @type {ArrayBuffer} */ (memory), view?.byteOffset, view?.byteLength);
  } catch {
    fail("the buffer that is to be decoded is detached; decode it before it is transferred");
  }
  return kind === "ArrayBuffer" ? bytes : bytes.slice();
}

/**
 * Return the option `maxBytes`; undefined if it is left out.
 * @param {unknown} options
 * @returns {number | undefined}
 */
export function maxBytesOf(options) {
  if (options === undefined || options === null) return undefined;
  if (typeof options !== "object") return fail(`options are ${described(options)}; give an object as { maxBytes: 1e9 }`);
  const { maxBytes } = /** @type {{ maxBytes?: unknown }} */ (options);
  if (maxBytes === undefined || maxBytes === null) return undefined;
  if (typeof maxBytes === "number" && maxBytes >= 0) return maxBytes;
  return fail(`maxBytes is ${described(maxBytes)}; give a number of bytes`);
}

/**
 * Check that a value is a tensor of floats as `decode` returns it.
 * @param {any} tensor
 * @param {Record<string, any>} arrays dtype → typed array of its data
 */
export function requireTensor(tensor, arrays) {
  if (typeof tensor !== "object" || tensor === null) {
    fail(`the tensor is ${described(tensor)}; give one that decode returned`);
  }
  const { dtype, data } = tensor;
  if (typeof dtype !== "string" || !Object.hasOwn(arrays, dtype)) {
    fail(`the dtype of the tensor is ${described(dtype)}; give one of ${Object.keys(arrays).join(", ")}`);
  }
  if (kindOf(data) !== arrays[dtype].name) {
    fail(`the data of the tensor of ${dtype} is ${described(data)}; give the ${arrays[dtype].name} that decode returned`);
  }
}
