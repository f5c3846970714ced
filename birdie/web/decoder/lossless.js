/** Scheme lossless: planes of bits, and other forms (docs/format.md, "Lossless"). */

import { fail } from "./bytes.js";
import { FLOAT16, FLOAT32, FLOAT64, BFLOAT16, emptyWords, storeFloats } from "./floats.js";
import { streamLayout } from "./streams.js";

/** @typedef {import("./floats.js").Dtype} Dtype */
/** @typedef {import("./floats.js").Words} Words */
/** @typedef {import("./streams.js").Stream} Stream */

/** Integers that are stored as differences: how far those of floats are exact. */
const INTEGRAL = new Map([
  [FLOAT16, 2 ** 11],
  [BFLOAT16, 2 ** 8],
  [FLOAT32, 2 ** 24],
  [FLOAT64, 2 ** 30],
]);

/** @param {Dtype} dtype */
const isInteger = (dtype) => /^u?int/.test(dtype.name);
/** @param {Dtype} dtype */
const isWide = (dtype) => isInteger(dtype) && dtype.bits >= 32;

/**
 * Return the layouts of the planes of a dtype.
 * @param {number} rows
 * @param {number} columns elements
 * @param {Dtype} dtype
 */
export function planeLayout(rows, columns, dtype) {
  if (!rows || !columns) return [];
  return dtype.planes.map(([, width]) =>
    streamLayout(rows, columns * dtype.words, width < 0 ? width : width > 8 ? 16 : 8),
  );
}

/** @type {import("./schemes.js").LayoutOf} */
export function losslessLayout(rows, columns, dtype, params) {
  if (!params.length) return planeLayout(rows, columns, dtype);
  const count = rows * columns;
  const [form, size, words] = params;
  const valid = [
    () => false,
    () => (isInteger(dtype) || dtype.name === "float4_e2m1fn_x2") && params.length === 1,
    () => isWide(dtype) && params.length === 1,
    () => (isWide(dtype) || INTEGRAL.has(dtype)) && params.length === 1,
    () =>
      INTEGRAL.has(dtype) &&
      dtype.bits < 64 &&
      params.length === 2 &&
      size >= 1 &&
      size <= count &&
      size <= 2 ** (dtype.bits - 1),
    () =>
      dtype.words === 1 &&
      params.length === 3 &&
      words >= 1 &&
      words <= Math.min(size, 256) &&
      32 * size <= count &&
      count < 2 ** 31,
  ][form];
  if (!count || !valid?.()) {
    fail(`scheme lossless has parameters ${params} for ${dtype.name} of ${rows} × ${columns}`);
  }
  const values = streamLayout(rows, columns, -32);
  if (form === 1) return [streamLayout((dtype.bits / 4) * rows, columns, 8)];
  if (form === 4) return [values, streamLayout(1, size, -32)];
  const runs = streamLayout(1, size, -32);
  return form === 5 ? [...planeLayout(1, words, dtype), runs, runs] : [values];
}

/** @type {import("./schemes.js").Scheme["cost"]} */
export function losslessCost(rows, columns, [form = 0, size = 0], dtype) {
  const each = form === 5 ? 2 : form === 1 ? dtype.bits : form ? 6 : 1;
  return each * rows * columns + (form === 5 ? 64 : form === 4 ? 8 : 0) * size;
}

/**
 * Return the words that planes make up.
 * @param {Dtype} dtype
 * @param {number} count elements
 * @param {(index: number) => Stream} read
 */
export function joinPlanes(dtype, count, read) {
  const words = emptyWords(dtype, count);
  const stride = dtype.bits === 64 ? 2 : 1;
  if (words.length) {
    dtype.planes.forEach(([low, width], index) => {
      const { values, step } = read(index);
      if (width > 0 && width < 16 && width !== 8) {
        for (const value of values) {
          if (value >= 1 << width) fail(`plane ${index} of ${dtype.name} holds ${value}, beyond ${(1 << width) - 1}`);
        }
      }
      insert(words, low >> 5, stride, values, step, low & 31);
    });
  }
  if (dtype.exponent) raiseSign(words, stride - 1, stride, Math.min(dtype.bits, 32), dtype.exponent);
  return words;
}

/**
 * Add a field to words that have zeros there.
 * @param {Words} words
 * @param {number} first
 * @param {number} stride
 * @param {Int32Array} values
 * @param {number} step
 * @param {number} shift
 */
function insert(words, first, stride, values, step, shift) {
  for (let i = first, at = 0; i < words.length; i += stride, at += step) words[i] |= values[at] << shift;
}

/**
 * Reorder exponent, sign, mantissa to sign, exponent, mantissa.
 * @param {Words} words
 * @param {number} first
 * @param {number} stride
 * @param {number} bits of a word
 * @param {number} exponent
 */
function raiseSign(words, first, stride, bits, exponent) {
  const mantissa = bits - 1 - exponent;
  const below = 2 ** mantissa - 1;
  for (let i = first; i < words.length; i += stride) {
    const word = words[i];
    const sign = (word >>> mantissa) & 1;
    words[i] = (sign << (bits - 1)) | ((word >>> (mantissa + 1)) << mantissa) | (word & below);
  }
}

/** @type {import("./schemes.js").DecodeOf} */
export function decodeLossless(rows, columns, dtype, params, read) {
  const count = rows * columns;
  switch (params[0]) {
    case 1:
      return fromHalves(rows, columns, dtype, read(0));
    case 2:
    case 3:
      return fromValues(count, dtype, read(0), params[0] === 3);
    case 4:
      return fromList(count, dtype, read(0), read(1), params[1]);
    case 5:
      return fromRuns(count, dtype, params, read);
    default:
      return joinPlanes(dtype, count, read);
  }
}

/**
 * Return words from half bytes, the lowest ones of a row first.
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {Stream} halves
 */
function fromHalves(rows, columns, dtype, { values, step }) {
  if (values.some((value) => value > 15)) fail("a half byte is above 15");
  const words = emptyWords(dtype, rows * columns);
  const stride = dtype.bits === 64 ? 2 : 1;
  const parts = dtype.bits / 4;
  for (let row = 0, at = 0; row < rows; row++) {
    for (let part = 0; part < parts; part++) {
      for (let column = 0; column < columns; column++, at++) {
        words[(row * columns + column) * stride + (part >> 3)] |= values[at * step] << (4 * (part & 7));
      }
    }
  }
  return words;
}

/**
 * Return words from integers, or from differences of each to the one before.
 * @param {number} count
 * @param {Dtype} dtype
 * @param {Stream} stream
 * @param {boolean} isDifferences
 */
function fromValues(count, dtype, { values, step }, isDifferences) {
  const limit = INTEGRAL.get(dtype);
  const isSigned = dtype.name[0] !== "u";
  const numbers = new Float64Array(limit ? count : 0);
  const words = emptyWords(dtype, limit ? 0 : count);
  const stride = dtype.bits >> 5;
  let low = 0; // the halves of 64 bits
  let high = 0;
  for (let i = 0; i < count; i++) {
    const sum = (isDifferences ? low : 0) + values[i * step];
    low = sum >>> 0;
    high = ((isDifferences ? high : 0) + Math.floor(sum / 2 ** 32)) | 0;
    const isNarrow = high === low >> 31;
    const fits = limit
      ? isNarrow && Math.abs(low | 0) <= limit
      : stride === 2
        ? isSigned || high >= 0
        : isSigned
          ? isNarrow
          : !high;
    if (!fits) fail(`an integer is beyond ${dtype.name}`);
    if (limit) numbers[i] = low | 0;
    else {
      words[i * stride] = low;
      if (stride === 2) words[i * 2 + 1] = high;
    }
  }
  return limit ? storeFloats(numbers, dtype) : words;
}

/**
 * Return words from their numbers in a list of magnitudes.
 * @param {number} count
 * @param {Dtype} dtype
 * @param {Stream} numbers −1 − number with the sign bit
 * @param {Stream} gaps between magnitudes
 * @param {number} size of the list
 */
function fromList(count, dtype, numbers, gaps, size) {
  const sign = 2 ** (dtype.bits - 1);
  const listed = new Float64Array(size);
  for (let i = 0, word = 0; i < size; i++) {
    const gap = gaps.values[i * gaps.step];
    word += gap;
    if (gap < (i ? 1 : 0) || word >= sign) fail(`the list of a tensor's magnitudes does not rise within ${dtype.name}`);
    listed[i] = word;
  }
  const words = emptyWords(dtype, count);
  for (let i = 0; i < count; i++) {
    const number = numbers.values[i * numbers.step];
    if (number < -size || number >= size) fail(`a number is beyond a list of ${size} magnitudes`);
    words[i] = number < 0 ? listed[-1 - number] + sign : listed[number];
  }
  return words;
}

/**
 * Return words from runs of equal ones.
 * @param {number} count
 * @param {Dtype} dtype
 * @param {number[]} params
 * @param {(index: number) => Stream} read
 */
function fromRuns(count, dtype, [, runs, size], read) {
  const listed = joinPlanes(dtype, size, read);
  const planes = dtype.planes.length;
  const numbers = sums(read(planes), runs, 1);
  const lengths = sums(read(planes + 1), runs, 2);
  const stride = dtype.bits === 64 ? 2 : 1;
  const words = emptyWords(dtype, count);
  let at = 0;
  for (let run = 0; run < runs; run++) {
    const number = numbers[run];
    const end = at + lengths[run];
    if (!(number >= 0 && number < size && end > at && end <= count)) at = count + 1;
    for (; at < end; at++) {
      for (let k = 0; k < stride; k++) words[at * stride + k] = listed[number * stride + k];
    }
    if (at > count) break;
  }
  if (at !== count) fail("the runs of a tensor do not add up to it");
  return words;
}

/**
 * Return numbers, each of which is a step plus the one before the last, so many times over.
 * @param {Stream} stream
 * @param {number} count
 * @param {number} times
 */
function sums({ values, step }, count, times) {
  const out = new Float64Array(count);
  for (let i = 0; i < count; i++) out[i] = values[i * step];
  for (; times; times--) {
    for (let i = 2; i < count; i++) out[i] += out[i - 2];
  }
  return out;
}
