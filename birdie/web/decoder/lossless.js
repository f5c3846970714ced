/** Scheme lossless: planes of bits, and other forms (docs/format.md, "Lossless"). */

import { fail } from "./bytes.js";
import { FLOAT16, FLOAT32, FLOAT64, BFLOAT16, emptyWords, storeFloats, widen } from "./floats.js";
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

/** Forms whose literals, levels or words are tensors of their own. */
const MATCHES = 6;
const SCALED = 7;
const TABLES = 8;
/** Dtypes of scales. */
const SCALES = [FLOAT32, FLOAT16, BFLOAT16];

/** @type {import("./schemes.js").LayoutOf} */
export function losslessLayout(rows, columns, dtype, params) {
  if (!params.length) return planeLayout(rows, columns, dtype);
  const count = rows * columns;
  const [form, size, words] = params;
  const isFloat = INTEGRAL.has(dtype) && dtype.bits < 64;
  const valid = [
    () => false,
    () => (isInteger(dtype) || dtype.name === "float4_e2m1fn_x2") && params.length === 1,
    () => isWide(dtype) && params.length === 1,
    () => (isWide(dtype) || INTEGRAL.has(dtype)) && params.length === 1,
    () => isFloat && params.length === 2 && size >= 1 && size <= count && size <= 2 ** (dtype.bits - 1),
    () =>
      dtype.words === 1 &&
      params.length === 3 &&
      words >= 1 &&
      words <= Math.min(size, 256) &&
      32 * size <= count &&
      count < 2 ** 31,
    () =>
      dtype.words === 1 &&
      params.length >= 4 &&
      words > 0 &&
      words < count &&
      size > 0 &&
      size <= count - words &&
      count < 2 ** 31 &&
      params[3] >= 0 &&
      params[3] < 27 &&
      params[4] !== MATCHES,
    () =>
      isFloat &&
      params.length === 5 &&
      size >= 1 &&
      size <= rows &&
      words >= 1 &&
      words <= columns &&
      isTable(params[3]) &&
      params[4] >= 0 &&
      params[4] < 6,
    () => isFloat && params.length === 2 && isTable(size),
  ][form];
  if (!count || !valid?.()) {
    fail(`scheme lossless has parameters ${params} for ${dtype.name} of ${rows} × ${columns}`);
  }
  const values = streamLayout(rows, columns, -32);
  if (form === 1) return [streamLayout((dtype.bits / 4) * rows, columns, 8)];
  if (form === 4) return [values, streamLayout(1, size, -32)];
  const numbers = streamLayout(1, size, -32);
  if (form === 5) return [...planeLayout(1, words, dtype), numbers, numbers];
  if (form === MATCHES) return [...losslessLayout(1, words, dtype, params.slice(4)), numbers, numbers, numbers];
  if (form < MATCHES) return [values];
  const levels = form === SCALED ? params[3] : size;
  const symbols = streamLayout(rows, columns, levels <= 256 ? 8 : -16);
  if (form === TABLES) return [symbols, ...planeLayout(rows, levels, dtype)];
  const table = params[4] < 3 ? [streamLayout(1, levels, -32)] : planeLayout(1, levels, FLOAT32);
  const [down, across] = [Math.ceil(rows / size), Math.ceil(columns / words)];
  return [symbols, ...table, ...planeLayout(down, across, SCALES[params[4] % 3])];
}

/** @param {number} levels */
const isTable = (levels) => levels >= 1 && levels <= 512;

/** @type {import("./schemes.js").Scheme["cost"]} */
export function losslessCost(rows, columns, params, dtype) {
  const [form = 0, size = 0, words = 0] = params;
  const count = rows * columns;
  if (form === MATCHES) return losslessCost(1, words, params.slice(4), dtype) + 4 * count + 80 * size;
  if (form === SCALED) return 24 * count + 8 * Math.ceil(rows / size) * Math.ceil(columns / words);
  if (form === TABLES) return 24 * count + 8 * rows * size;
  const each = form === 5 ? 2 : form === 1 ? dtype.bits : form ? 6 : 1;
  return each * count + (form === 5 ? 64 : form === 4 ? 8 : 0) * size;
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
    case MATCHES:
      return fromMatches(count, dtype, params, read);
    case SCALED:
      return fromScales(rows, columns, dtype, params, read);
    case TABLES:
      return fromTables(rows, columns, dtype, params[1], read);
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

/**
 * Return words from literals and matches of words before them.
 * @param {number} count
 * @param {Dtype} dtype
 * @param {number[]} params
 * @param {(index: number) => Stream} read
 */
function fromMatches(count, dtype, [, matches, size, orders, ...form], read) {
  const literals = decodeLossless(1, size, dtype, form, read);
  const first = losslessLayout(1, size, dtype, form).length;
  const counts = sums(read(first), matches, orders % 3);
  const lengths = sums(read(first + 1), matches, Math.floor(orders / 3) % 3);
  const distances = sums(read(first + 2), matches, Math.floor(orders / 9));
  const stride = dtype.bits === 64 ? 2 : 1;
  const words = emptyWords(dtype, count);
  let at = 0;
  let used = 0;
  for (let match = 0; match <= matches; match++) {
    const isLast = match === matches;
    const before = isLast ? size - used : counts[match];
    if (!(before >= 0 && before <= size - used && before <= count - at)) fail(WRONG_MATCHES);
    words.set(literals.subarray(used * stride, (used + before) * stride), at * stride);
    used += before;
    at += before;
    if (isLast) break;
    const length = lengths[match];
    const distance = distances[match];
    if (!(length >= 1 && length <= count - at && distance >= 1 && distance <= at)) fail(WRONG_MATCHES);
    const end = (at + length) * stride;
    for (let i = at * stride; i < end; i++) words[i] = words[i - distance * stride];
    at += length;
  }
  if (at !== count) fail(WRONG_MATCHES);
  return words;
}

const WRONG_MATCHES = "the matches of a tensor do not add up to it";

/**
 * Return words of levels times scales of blocks.
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {number[]} params
 * @param {(index: number) => Stream} read
 */
function fromScales(rows, columns, dtype, [, height, width, count, kind], read) {
  const symbols = read(0);
  requireLevels(symbols, count);
  let levels = new Float32Array(count);
  let first = 2;
  if (kind < 3) {
    const { values, step } = read(1);
    for (let i = 0, level = 0, zeros = 0; i < count; i++) {
      const gap = values[i * step];
      level += gap;
      if (i && !gap) {
        levels[i - 1] = -0;
        zeros += level ? 2 : 1;
      }
      if ((i && gap < 0) || Math.abs(level) > 2 ** 23 || zeros > 1) {
        fail("the levels of a tensor do not rise within 24 bits");
      }
      levels[i] = level;
    }
  } else {
    levels = floatsOf(FLOAT32, count, (index) => read(1 + index));
    first = 1 + FLOAT32.planes.length;
  }
  const across = Math.ceil(columns / width);
  const form = SCALES[kind % 3];
  const scales = floatsOf(form, Math.ceil(rows / height) * across, (index) => read(first + index));
  if (!levels.every(Number.isFinite) || !scales.every(Number.isFinite)) {
    fail("a level or a scale of a tensor is not finite");
  }
  const out = new Float64Array(rows * columns);
  for (let row = 0, at = 0; row < rows; row++) {
    const block = Math.floor(row / height) * across;
    for (let column = 0; column < columns; column++, at++) {
      out[at] = levels[symbols.values[at * symbols.step]] * scales[block + Math.floor(column / width)];
    }
  }
  return storeFloats(out, dtype);
}

/**
 * Return words from a table for each row.
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {number} count
 * @param {(index: number) => Stream} read
 */
function fromTables(rows, columns, dtype, count, read) {
  const symbols = read(0);
  requireLevels(symbols, count);
  const table = joinPlanes(dtype, rows * count, (index) => read(1 + index));
  const words = emptyWords(dtype, rows * columns);
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, at++) {
      words[at] = table[row * count + symbols.values[at * symbols.step]];
    }
  }
  return words;
}

/**
 * Return the floats that planes make up.
 * @param {Dtype} dtype of at most 32 bits
 * @param {number} count
 * @param {(index: number) => Stream} read
 */
function floatsOf(dtype, count, read) {
  const words = joinPlanes(dtype, count, read);
  const bits = dtype === FLOAT32 ? words : widen(/** @type {Uint16Array} */ (words), dtype);
  return new Float32Array(bits.buffer, bits.byteOffset, count);
}

/**
 * @param {Stream} symbols
 * @param {number} count
 */
function requireLevels({ values }, count) {
  if (values.some((value) => value < 0 || value >= count)) fail(`a number is beyond a table of ${count} levels`);
}
