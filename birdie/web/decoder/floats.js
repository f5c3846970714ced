/** Dtypes, their words, and conversions between floats (docs/format.md, "File" and "Schemes"). */

import { requireTensor } from "./arguments.js";
import { fail } from "./bytes.js";
import { SIXTEENTHS } from "./frequency.js";

/**
 * @typedef {Uint8Array | Uint16Array | Uint32Array} Words words of a tensor; those of 64 bits are two, low one first
 */

/**
 * @typedef {object} Dtype
 * @property {string} name
 * @property {number} bits of a word
 * @property {number} words of an element: two of complex numbers
 * @property {number} exponent bits above which the sign lies, and below which it is moved first; 0: it stays
 * @property {number[][]} planes lowest bit and width, negative for two's complement
 * @property {any} array typed array of its elements, of words where JavaScript has none
 */

const BYTE = [[0, 8]];
const BYTES = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => [8 * i, 8]).reverse();
const HALF = BYTES.slice(6);
const DOUBLE = [[53, 11], [48, 5], ...BYTES.slice(2)];

/** By code. @type {Dtype[]} */
export const DTYPES = /** @type {[string, number, number, number, number[][], any][]} */ ([
  ["bool", 8, 1, 0, [[0, 1]], Uint8Array],
  ["uint8", 8, 1, 0, BYTE, Uint8Array],
  ["int8", 8, 1, 0, [[0, -8]], Int8Array],
  ["uint16", 16, 1, 0, [[0, 16]], Uint16Array],
  ["int16", 16, 1, 0, [[0, -16]], Int16Array],
  ["uint32", 32, 1, 0, BYTES.slice(4), Uint32Array],
  ["int32", 32, 1, 0, BYTES.slice(4), Int32Array],
  ["uint64", 64, 1, 0, BYTES, BigUint64Array],
  ["int64", 64, 1, 0, BYTES, BigInt64Array],
  ["float16", 16, 1, 8, HALF, Uint16Array],
  ["bfloat16", 16, 1, 8, HALF, Uint16Array],
  ["float32", 32, 1, 8, BYTES.slice(4), Float32Array],
  ["float64", 64, 1, 11, DOUBLE, Float64Array],
  ["complex32", 16, 2, 8, HALF, Uint16Array],
  ["complex64", 32, 2, 8, BYTES.slice(4), Float32Array],
  ["complex128", 64, 2, 11, DOUBLE, Float64Array],
  ["float8_e4m3fn", 8, 1, 0, BYTE, Uint8Array],
  ["float8_e4m3fnuz", 8, 1, 0, BYTE, Uint8Array],
  ["float8_e5m2", 8, 1, 0, BYTE, Uint8Array],
  ["float8_e5m2fnuz", 8, 1, 0, BYTE, Uint8Array],
  ["float8_e8m0fnu", 8, 1, 0, BYTE, Uint8Array],
  ["float4_e2m1fn_x2", 8, 1, 0, BYTE, Uint8Array],
]).map(([name, bits, words, exponent, planes, array]) => ({ name, bits, words, exponent, planes, array }));

export const FLOAT16 = DTYPES[9];
export const BFLOAT16 = DTYPES[10];
export const FLOAT32 = DTYPES[11];
export const FLOAT64 = DTYPES[12];

/** Largest finite numbers of real dtypes, within those of float32. */
const MOST = new Map([
  [FLOAT16, 65504],
  [BFLOAT16, 2 ** 127 * (2 - 2 ** -7)],
  [FLOAT32, 2 ** 127 * (2 - 2 ** -23)],
  [FLOAT64, 2 ** 127 * (2 - 2 ** -23)],
]);

/** Return whether a dtype is of real floats that are quantized. @param {Dtype} dtype */
export function isReal(dtype) {
  return MOST.has(dtype);
}

/**
 * Return words of `count` elements, all zero.
 * @param {Dtype} dtype
 * @param {number} count
 * @returns {Words}
 */
export function emptyWords(dtype, count) {
  if (dtype.bits === 8) return new Uint8Array(count * dtype.words);
  if (dtype.bits === 16) return new Uint16Array(count * dtype.words);
  return new Uint32Array((count * dtype.words * dtype.bits) / 32);
}

/**
 * Return numbers in a real dtype, to the nearest, ties to even: what `store` of docs/format.md says.
 * @param {Float64Array | Float32Array} values without NaN; clipped in place
 * @param {Dtype} dtype
 * @returns {Words}
 */
export function storeFloats(values, dtype) {
  const most = MOST.get(dtype) ?? fail(`${dtype.name} cannot be quantized`);
  const single = values instanceof Float32Array ? values : new Float32Array(values.length);
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    single[i] = value > most ? most : value < -most ? -most : value;
  }
  const bits = new Uint32Array(single.buffer, single.byteOffset, single.length);
  if (dtype === FLOAT32) return bits;
  if (dtype === FLOAT64) return new Uint32Array(new Float64Array(single).buffer);
  const out = new Uint16Array(bits.length);
  const isHalf = dtype === FLOAT16;
  for (let i = 0; i < bits.length; i++) out[i] = isHalf ? toHalf(bits[i], single[i]) : toBfloat(bits[i]);
  return out;
}

/** @param {number} bits of a finite float32 */
function toBfloat(bits) {
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

/**
 * @param {number} bits of a finite float32
 * @param {number} value
 */
function toHalf(bits, value) {
  const sign = (bits >>> 16) & 0x8000;
  const size = bits & 0x7fffffff;
  // Below 2**-14 the steps are those of 2**-24: scaling is exact, and adding 2**23 rounds.
  if (size < 0x38800000) return sign | (Math.fround(Math.abs(value) * 2 ** 24 + 2 ** 23) - 2 ** 23);
  return sign | ((size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13);
}

/**
 * Return the float32 bits of 16-bit floats.
 * @param {Uint16Array} words
 * @param {Dtype} dtype float16 or bfloat16
 */
export function widen(words, dtype) {
  const out = new Uint32Array(words.length);
  for (let i = 0; i < words.length; i++) {
    const word = words[i];
    const exponent = (word >> 10) & 31;
    const mantissa = word & 1023;
    if (dtype === BFLOAT16) out[i] = word << 16;
    else {
      const sign = (word & 0x8000) << 16;
      if (exponent === 31) out[i] = sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0);
      else if (exponent) out[i] = sign | ((exponent + 112) << 23) | (mantissa << 13);
      else if (!mantissa) out[i] = sign;
      else {
        const shift = Math.clz32(mantissa) - 21;
        out[i] = sign | ((113 - shift) << 23) | (((mantissa << shift) & 1023) << 13);
      }
    }
  }
  return out;
}

/**
 * Return the numbers of a tensor of floats that `decode` returned, as float32.
 * @param {{ dtype: string, data: any }} tensor of float16, bfloat16, float32 or float64
 * @returns {Float32Array}
 */
export function toFloat32(tensor) {
  requireTensor(tensor, Object.fromEntries([...MOST.keys()].map(({ name, array }) => [name, array])));
  if (tensor.dtype === FLOAT32.name) return tensor.data;
  if (tensor.dtype === FLOAT64.name) return new Float32Array(tensor.data);
  return new Float32Array(widen(tensor.data, tensor.dtype === FLOAT16.name ? FLOAT16 : BFLOAT16).buffer);
}

/**
 * Return the steps of indices of sixteenths of an octave, exact in float32.
 * @param {ArrayLike<number>} indices
 */
export function stepsOf(indices) {
  const steps = new Float32Array(indices.length);
  for (let i = 0; i < steps.length; i++) {
    const index = indices[i];
    if (!(index >= -2016 && index <= 2047)) fail(`a scale index is ${index}, outside −2016 … 2047`);
    steps[i] = SIXTEENTHS[index & 15] * 2 ** ((index >> 4) - 23);
  }
  return steps;
}
