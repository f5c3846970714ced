/** Decoder of .birdie files: birdie.c as WebAssembly, and what JavaScript needs around it.
 *
 *     import { decode } from "./decode.js";
 *     const tensors = await decode(await (await fetch("model.birdie")).arrayBuffer());
 *     tensors["head.weight"]; // { dtype: "bfloat16", shape: [1024, 512], data: Uint16Array }
 *
 * It does what `birdie.load` does, to the same bits. Every length is checked before it is believed; whatever is wrong
 * with a file is an Error of one sentence.
 */

/**
 * @typedef {object} Tensor
 * @property {string} dtype as torch names it
 * @property {number[]} shape
 * @property {any} data typed array in row-major order. Of dtypes that JavaScript lacks it has the words (float16,
 *     bfloat16: Uint16Array, 8-bit floats: Uint8Array, bool: 0 or 1), of complex ones real and imaginary parts in turn
 */

/**
 * @typedef {object} Options
 * @property {Iterable<string> | null} [names] of the tensors to decode; default: all
 * @property {number | null} [maxBytes] refuse a file that decodes to more; default: the larger of 1 GiB and 64 × the file
 * @property {number | null} [maxOperations] refuse a file that takes more, of about a nanosecond; default: by maxBytes
 * @property {((done: number, total: number) => unknown) | null} [onProgress] is called with decoded bytes, and awaited,
 *     after each stored array: a function that waits for a timer keeps a page alive that decodes without a worker
 */

/** Typed array of a dtype's elements or words. Those that are not here have Uint8Array. @type {Record<string, any>} */
const ARRAYS = {
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  uint64: BigUint64Array,
  int64: BigInt64Array,
  float16: Uint16Array,
  bfloat16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  complex32: Uint16Array,
  complex64: Float32Array,
  complex128: Float64Array,
};
const REAL = ["float16", "bfloat16", "float32", "float64"];
const MIN_LIMIT = 2 ** 30;
const PER_BYTE = 64;
const NUMBERS = 26; // that describe a tensor

/** @type {BufferSource} */
let program;
/** @type {Promise<WebAssembly.Module> | undefined} */
let compiled;

/**
 * Say what birdie.wasm is; it is compiled when a file is opened.
 * @param {BufferSource} bytes
 */
export function useProgram(bytes) {
  program = bytes;
  compiled = undefined;
}

/**
 * Throw an Error: one sentence that says what is wrong, and where.
 * @param {string} message
 * @returns {never}
 */
export function fail(message) {
  throw new Error(message.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "?")); // names may have line breaks
}

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
 * Return the bytes of a buffer or view.
 * @param {unknown} buffer
 */
function bytesOf(buffer) {
  const view = ArrayBuffer.isView(buffer) ? buffer : undefined;
  const memory = view ? view.buffer : buffer;
  if (!["ArrayBuffer", "SharedArrayBuffer"].includes(kindOf(memory))) {
    fail(`what is to be decoded is ${described(buffer)}; give an ArrayBuffer or Uint8Array, the bytes of a file`);
  }
  try {
    return new Uint8Array(/** @type {ArrayBuffer} */ (memory), view?.byteOffset, view?.byteLength);
  } catch {
    return fail("the buffer that is to be decoded is detached; decode it before it is transferred");
  }
}

/**
 * Return the options, checked.
 * @param {any} options
 * @returns {Options & { names: string[] | null }}
 */
export function optionsOf(options) {
  if (options === undefined || options === null) options = {};
  if (typeof options !== "object") fail(`options are ${described(options)}; give an object as { maxBytes: 1e9 }`);
  for (const name of ["maxBytes", "maxOperations"]) {
    const value = options[name] ?? 0;
    if (typeof value !== "number" || !(value >= 0)) fail(`${name} is ${described(value)}; give a number`);
  }
  const { names, onProgress } = options;
  if (onProgress !== undefined && onProgress !== null && typeof onProgress !== "function") {
    fail(`onProgress is ${described(onProgress)}; give a function`);
  }
  if (names === undefined || names === null) return { ...options, names: null };
  const isList = typeof names !== "string" && typeof names[Symbol.iterator] === "function";
  const list = isList ? [...names] : fail(`names is ${described(names)}; give an array of the names of tensors`);
  for (const name of list) if (typeof name !== "string") fail(`a name of a tensor is ${described(name)}; give a text`);
  return { ...options, names: list };
}

/** @typedef {ReturnType<File["tensor"]>} Described */

/** An open file: an instance of birdie.wasm, which holds its bytes. */
export class File {
  /**
   * @param {any} wasm the functions of birdie/standalone/c/wasm.c
   * @param {Uint8Array} bytes
   * @param {ReturnType<typeof optionsOf>} options
   */
  constructor(wasm, bytes, { maxBytes, maxOperations }) {
    this.wasm = wasm;
    this.left = maxBytes ?? Math.max(MIN_LIMIT, PER_BYTE * bytes.length);
    const start = this.allocate(bytes.length);
    this.bytes(start, bytes.length).set(bytes);
    this.check(wasm.open(start, bytes.length, maxBytes ?? 0, maxOperations ?? 0)); // 0: the default
    /** @type {any} */
    this.metadata = JSON.parse(this.text(wasm.metadata()) || "{}");
    this.tensors = Array.from({ length: wasm.tensorCount() }, (_, i) => this.tensor(i));
  }

  /**
   * Return bytes of the memory; they are gone when it grows.
   * @param {number} start
   * @param {number} size
   */
  bytes(start, size) {
    return new Uint8Array(this.wasm.memory.buffer, start, size);
  }

  /**
   * Return the numbers that a function left.
   * @param {number} start
   */
  numbers(start) {
    return [...new Float64Array(this.wasm.memory.buffer, start, NUMBERS)];
  }

  /**
   * Return the text whose start and bytes a function left.
   * @param {number} at
   */
  text(at) {
    const [start, size] = this.numbers(at);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.bytes(start, size));
  }

  /**
   * Return the start of new memory.
   * @param {number} size
   * @returns {number}
   */
  allocate(size) {
    return this.wasm.allocate(size) || fail(`there is no memory for ${size} bytes of the file; decode it in parts`);
  }

  /**
   * Throw the sentence of an error, 0 being none.
   * @param {number} error
   * @param {string} [name] of the tensor that has it
   */
  check(error, name) {
    if (!error) return;
    const sentence = this.text(this.wasm.errorText(error));
    const inJavaScript = sentence.replace(/max_(.)/g, (_, letter) => `max${letter.toUpperCase()}`);
    fail(name === undefined ? inJavaScript : `tensor '${name}': ${inJavaScript}`);
  }

  /** @param {number} index */
  tensor(index) {
    const numbers = this.numbers(this.wasm.tensor(index));
    const [, , type, array, first, elements, bytes, isAlias, isCopy, dimensions] = numbers;
    const name = this.text(this.wasm.tensor(index));
    const dtype = this.text(this.wasm.dtypeName(type));
    const shape = numbers.slice(10, 10 + dimensions);
    return { name, dtype, shape, array, start: elements && (first * bytes) / elements, bytes, isAlias, isCopy };
  }

  /**
   * Throw unless so many bytes more are within `maxBytes`.
   * @param {number} bytes
   */
  take(bytes) {
    if (bytes > this.left) fail(`the file takes ${bytes} bytes to decode, more than ${this.left} allowed; raise maxBytes`);
    this.left -= bytes;
  }

  /**
   * Check what decoding tensors takes.
   * @param {Described[]} tensors
   * @returns {{ array: number, size: number, members: Described[] }[]} each array that holds some, and which
   */
  plan(tensors) {
    /** @type {Map<number, Described[]>} */
    const members = new Map();
    for (const tensor of tensors) {
      const known = members.get(tensor.array);
      if (known) known.push(tensor);
      else members.set(tensor.array, [tensor]);
    }
    const parts = Array.from(members, ([array, held]) => {
      const [error, size] = this.numbers(this.wasm.array(array));
      this.check(error, held[0].name);
      return { array, size, members: held };
    });
    this.take(parts.reduce((sum, { size }) => sum + size, 0));
    if (tensors.length === this.tensors.length) this.check(this.wasm.check());
    return parts;
  }

  /**
   * Decode arrays, and call `use` with each tensor and its bytes, in memory that is used again.
   * @param {ReturnType<File["plan"]>} parts
   * @param {Options} options
   * @param {(tensor: Described, bytes: Uint8Array) => void} use
   */
  async decode(parts, { onProgress }, use) {
    const total = parts.reduce((sum, { size }) => sum + size, 0);
    let done = 0;
    for (const { array, size, members } of parts) {
      const start = this.allocate(size);
      this.check(this.wasm.decode(array, start, size), members[0].name);
      for (const member of members) use(member, this.bytes(start + member.start, member.bytes));
      this.wasm.release(start);
      done += size;
      await onProgress?.(done, total);
    }
  }
}

/**
 * Open a file.
 * @param {unknown} buffer
 * @param {ReturnType<typeof optionsOf>} options
 */
export async function open(buffer, options) {
  const bytes = bytesOf(buffer);
  compiled ??= WebAssembly.compile(program);
  const { exports } = await WebAssembly.instantiate(await compiled);
  return new File(exports, bytes, options);
}

/**
 * Decode a file.
 * @param {ArrayBuffer | Uint8Array} buffer the bytes of a .birdie file, which stay as they are meanwhile
 * @param {Options | null} [options]
 * @returns {Promise<Record<string, Tensor>>} name → tensor; tied names share one. The object has no prototype
 */
export async function decode(buffer, options) {
  const checked = optionsOf(options);
  const file = await open(buffer, checked);
  if (file.wasm.hasViews()) fail("the file holds views of tensors, which are not decoded here; use birdie");
  let { tensors } = file;
  if (checked.names) {
    const known = new Map(tensors.map((tensor) => [tensor.name, tensor]));
    const find = (/** @type {string} */ name) => known.get(name) ?? fail(`the file has no tensor '${name}'`);
    tensors = [...new Set(checked.names.map(find))];
  }
  const parts = file.plan(tensors);
  file.take(tensors.reduce((sum, { isCopy, bytes }) => sum + (isCopy ? bytes : 0), 0));
  /** @type {Map<Described, Tensor>} */
  const decoded = new Map();
  /** @type {Map<string, Tensor>} array and first element → tensor */
  const shared = new Map();
  await file.decode(parts, checked, (tensor, bytes) => {
    const { dtype, shape, array, start, isCopy } = tensor;
    const key = `${array} ${start}`;
    let made = isCopy ? undefined : shared.get(key);
    if (!made) {
      const own = newBytes(bytes.length);
      own.set(bytes);
      made = { dtype, shape, data: new (ARRAYS[dtype] ?? Uint8Array)(own.buffer) };
      if (!isCopy) shared.set(key, made);
    }
    decoded.set(tensor, made);
  });
  /** @type {Record<string, Tensor>} */
  const result = Object.create(null);
  for (const tensor of tensors) result[tensor.name] = /** @type {Tensor} */ (decoded.get(tensor));
  return result;
}

/**
 * Return new bytes for decoded elements.
 * @param {number} size
 */
export function newBytes(size) {
  try {
    return new Uint8Array(size);
  } catch {
    return fail(`there is no memory for ${size} decoded bytes; decode the file in parts`);
  }
}

/**
 * Return the numbers of a tensor of floats that `decode` returned, as float32.
 * @param {{ dtype: string, data: any }} tensor of float16, bfloat16, float32 or float64
 * @returns {Float32Array}
 */
export function toFloat32(tensor) {
  if (typeof tensor !== "object" || tensor === null) {
    fail(`the tensor is ${described(tensor)}; give one that decode returned`);
  }
  const { dtype, data } = tensor;
  if (!REAL.includes(dtype)) fail(`the dtype of the tensor is ${described(dtype)}; give one of ${REAL.join(", ")}`);
  if (kindOf(data) !== ARRAYS[dtype].name) {
    fail(`the data of the tensor of ${dtype} is ${described(data)}; give the ${ARRAYS[dtype].name} that decode returned`);
  }
  if (dtype === "float32") return data;
  if (dtype === "float64") return new Float32Array(data);
  if (dtype === "bfloat16") return new Float32Array(Uint32Array.from(data, (word) => word << 16).buffer);
  return Float32Array.from(data, halfToFloat);
}

/** @param {number} word of float16 */
function halfToFloat(word) {
  const exponent = (word >> 10) & 31;
  const mantissa = word & 1023;
  const size = exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
  return (word >> 15 ? -1 : 1) * (exponent < 31 ? size : mantissa ? NaN : Infinity);
}
