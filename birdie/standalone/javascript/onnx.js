/** ONNX models of .birdie files, for onnxruntime-web: other bytes and decoded tensors, in turns (docs/format.md, `onnx`).
 *
 *     kept file ──other bytes──┐
 *                              ├──► the model, and the files of external data beside it
 *     tensors ─────────────────┘
 */

import { fail, newBytes, open, optionsOf } from "./decoder.js";
import { compareTexts, inOrder } from "./order.js";

/** @typedef {import("./decoder.js").Described} Described */
/** @typedef {import("./decoder.js").File} File */
/** @typedef {import("./decoder.js").Options} Options */

/**
 * Return the bytes of an ONNX model, for `InferenceSession.create`.
 * @param {ArrayBuffer | Uint8Array} buffer the bytes of a .birdie file of the model
 * @param {Omit<Options, "names"> | null} [options]
 * @returns {Promise<Uint8Array>}
 */
export async function toOnnx(buffer, options) {
  const [[, model], ...others] = Object.entries(await toOnnxFiles(buffer, options));
  if (others.length) fail(`the model has ${others.length} files beside it, such as '${others[0][0]}'; use toOnnxFiles`);
  return model;
}

/**
 * Return the files of an ONNX model. Those after the first are what a session takes as `externalData`.
 * @param {ArrayBuffer | Uint8Array} buffer the bytes of a .birdie file of the model
 * @param {Omit<Options, "names"> | null} [options]
 * @returns {Promise<Record<string, Uint8Array>>} name → bytes, the model first. The object has no prototype
 */
export async function toOnnxFiles(buffer, options) {
  const checked = optionsOf(options);
  const file = await open(buffer, checked);
  const { onnx, order = [] } = file.metadata;
  if (!Array.isArray(onnx)) fail("the file holds no ONNX model; decode gives its tensors");
  const parts = file.plan(file.tensors);
  const tensors = inOrder(file.tensors, order);
  const kept = keptFiles(file);
  /** @type {Record<string, Uint8Array>} */
  const files = Object.create(null);
  /** @type {Map<Described, { target: Uint8Array, axes: number[] }>} */
  const places = new Map();
  let count = 0;
  for (const field of onnx) {
    const [name, ...pieces] = Array.isArray(field) ? field : noModel();
    const other = kept.get(name) ?? noModel();
    kept.delete(name);
    const held = tensors.slice(count, (count += pieces.length));
    if (held.length < pieces.length) noModel();
    const size = held.reduce((sum, { bytes }) => sum + bytes, other.length);
    file.take(other.length);
    const out = (files[name] = newBytes(size));
    let from = 0;
    let to = 0;
    const putOther = (/** @type {number} */ end) => {
      if (!(end <= other.length)) noModel();
      out.set(other.subarray(from, end), to);
      to += end - from;
      from = end;
    };
    for (const [index, tensor] of held.entries()) {
      const [gap, ...axes] = [pieces[index]].flat();
      if (!isNatural(gap) || (axes.length && !isPermutation(axes, tensor.shape.length))) noModel();
      putOther(from + gap);
      places.set(tensor, { target: out.subarray(to, to + tensor.bytes), axes });
      to += tensor.bytes;
    }
    putOther(other.length);
  }
  if (!Object.keys(files).length || count < tensors.length) noModel();
  await file.decode(parts, checked, (tensor, bytes) => {
    const { target, axes } = /** @type {{ target: Uint8Array, axes: number[] }} */ (places.get(tensor));
    if (axes.length) putPermuted(target, bytes, tensor.shape, axes);
    else target.set(bytes);
  });
  return files;
}

/** @returns {never} */
function noModel() {
  return fail("the ONNX model in the metadata of the file is not sound; the file is damaged");
}

/** @param {unknown} value */
function isNatural(value) {
  return Number.isInteger(value) && Number(value) >= 0;
}

/**
 * @param {unknown[]} axes
 * @param {number} count
 */
function isPermutation(axes, count) {
  return axes.length === count && Array.from({ length: count }, (_, axis) => axis).every((axis) => axes.includes(axis));
}

/**
 * Return the files that are kept beside the tensors.
 * @param {File} file
 * @returns {Map<string, Uint8Array>} name → bytes
 */
function keptFiles(file) {
  /** @type {[string, number][]} */
  const sizes = Object.entries(file.metadata.files ?? {});
  // Objects have names that are integers first; the file has them in the order of code points.
  sizes.sort(([one], [other]) => compareTexts(one, other));
  const total = sizes.reduce((sum, [, size]) => sum + size, 0);
  file.take(total);
  const start = file.allocate(total);
  if (file.wasm.unpack(start, total)) fail("the files kept in the file are not those that its header lists; it is damaged");
  const content = file.bytes(start, total).slice();
  file.wasm.release(start);
  let end = 0;
  return new Map(sizes.map(([name, size]) => [name, content.subarray(end, (end += size))]));
}

/**
 * Write a tensor whose axis axes[i] becomes axis i.
 * @param {Uint8Array} target
 * @param {Uint8Array} bytes of the tensor
 * @param {number[]} shape of the tensor
 * @param {number[]} axes
 */
function putPermuted(target, bytes, shape, axes) {
  const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((product, size) => product * size, 1));
  const size = bytes.length / shape.reduce((product, size) => product * size, 1); // of an element
  const sizes = axes.map((axis) => shape[axis]);
  const steps = axes.map((axis) => strides[axis] * size);
  const index = axes.map(() => 0);
  for (let at = 0, from = 0; at < target.length; ) {
    for (let i = 0; i < size; i++) target[at++] = bytes[from + i];
    // Count up the index of the next element, from the last axis to the first.
    for (let axis = axes.length - 1; axis >= 0; axis--) {
      from += steps[axis];
      if (++index[axis] < sizes[axis]) break;
      from -= steps[axis] * sizes[axis];
      index[axis] = 0;
    }
  }
}
