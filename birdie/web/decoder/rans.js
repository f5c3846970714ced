/** Coder "static": rANS with a table for each class of rows (docs/coders.md, "Coder 4"). */

import { CHUNK, chunkRows, joinTokens, lookUp, machine, takeAlphabet } from "./alphabet.js";
import { fail } from "./bytes.js";
import { takeClasses, takeTables } from "./frequency.js";
import { opened, words16 } from "./numbers.js";
import { addPrediction, takePrediction } from "./prediction.js";

/**
 * @typedef {object} Side
 * @property {Int32Array} slots (tables, 2**precision): frequency − 1 from bit 15 on, offset within the symbol below
 * @property {Int32Array} values of the slots
 * @property {number} precision
 * @property {number} parities tables of a class
 * @property {import("./alphabet.js").Machine} paths
 */

/**
 * Lay out the slots of tables.
 * @param {Int32Array[]} tables
 * @param {Int32Array} meanings what is decoded for each symbol
 * @param {number} precision
 */
function layOut(tables, meanings, precision) {
  const slots = new Int32Array(tables.length << precision);
  const values = new Int32Array(slots.length);
  let slot = 0;
  for (const table of tables) {
    for (let symbol = 0; symbol < table.length; symbol++) {
      for (let offset = 0; offset < table[symbol]; offset++, slot++) {
        slots[slot] = ((table[symbol] - 1) << 15) | offset;
        values[slot] = meanings[symbol];
      }
    }
  }
  return { slots, values };
}

/**
 * Decode a chunk of rows with one table for each: four states of 32 bits take turns. Return whether it ends right.
 * @param {Uint16Array} words four more than there are
 * @param {number} position
 * @param {number} last
 * @param {Uint8Array} classes
 * @param {number} columns
 * @param {Side} side
 * @param {Int32Array} out
 */
function decodePlain(words, position, last, classes, columns, side, out) {
  const { slots, values, precision } = side;
  const mask = (1 << precision) - 1;
  const x = new Int32Array(4);
  for (let lane = 0; lane < 4; lane++) x[lane] = words[position + 2 * lane] | (words[position + 2 * lane + 1] << 16);
  position += 8;
  let at = 0;
  for (let row = 0; row < classes.length; row++) {
    const first = classes[row] << precision;
    for (let column = 0; column < columns; column++, at++) {
      if (position > last) return false;
      const state = x[column & 3];
      const slot = first + (state & mask);
      const entry = slots[slot];
      out[at] = values[slot];
      const next = (Math.imul((entry >>> 15) + 1, state >>> precision) + (entry & 32767)) | 0;
      // Whether a word is needed is a coin toss: no branch.
      const need = ((next >>> 16) - 1) >>> 31;
      x[column & 3] = (next << (need << 4)) | (words[position] & -need);
      position += need;
    }
  }
  return position === last && x.every((state) => state === 65536);
}

/**
 * Decode a chunk whose tables come in pairs, for even and odd states of a trellis: four states of 40 bits.
 * @param {Uint16Array} words four more than there are
 * @param {number} position
 * @param {number} last
 * @param {Uint8Array} classes
 * @param {number} columns
 * @param {Side} side
 * @param {Int32Array} out
 */
function decodePaired(words, position, last, classes, columns, side, out) {
  const { slots, values, precision, paths } = side;
  const { shift, flip } = paths;
  const size = 1 << precision;
  const state = new Int32Array(columns);
  const x = new Float64Array(4);
  for (let lane = 0; lane < 4; lane++) {
    const from = position + 3 * lane;
    x[lane] = words[from] + 65536 * words[from + 1] + 2 ** 32 * words[from + 2];
  }
  position += 12;
  let at = 0;
  for (let row = 0; row < classes.length; row++) {
    const first = classes[row] << (precision + 1);
    for (let column = 0; column < columns; column++, at++) {
      if (position > last) return false;
      const path = column & paths.mask;
      const s = state[path];
      const quotient = Math.floor(x[column & 3] / size);
      const slot = first + ((s & 1) << precision) + (x[column & 3] - quotient * size);
      const entry = slots[slot];
      const value = (out[at] = values[slot]);
      const next = ((entry >>> 15) + 1) * quotient + (entry & 32767);
      x[column & 3] = next < 2 ** 24 ? next * 65536 + words[position++] : next;
      state[path] = (s >> 1) ^ (-(s & 1) & shift) ^ (-(value & 1) & flip);
    }
  }
  return position === last && x.every((one) => one === 2 ** 24);
}

/**
 * Decode a stream of the coder "static"; the array may be transposed.
 * @type {import("./streams.js").Decode}
 */
export function decodeStatic(payload, layout) {
  const [side, data] = opened(payload);
  const alphabet = takeAlphabet(side);
  const transposed = side.take(5, 1, "the scan") === 1;
  const precision = side.take(6, 7, "the precision") + 8;
  const mayPair = Math.abs(layout.states) > 1;
  const form = side.take(7, mayPair ? 63 : 31, "the number of classes");
  const paired = form > 31;
  const count = (form & 31) + 1;
  const [rows, columns] = transposed ? [layout.columns, layout.rows] : [layout.rows, layout.columns];
  if (columns < 8 && count > 1) fail(`rows of ${columns} in a stream have classes`);
  const prediction = takePrediction(side, rows, columns);
  const size = alphabet.values.length;
  const zero = prediction ? side.take(23, size - 1, "the zero") : 0;
  const classes = takeClasses(side, rows, count);
  const tables = takeTables(side, paired ? 2 * count : count, size, precision);
  const inRows = paired || classes.some((kind) => kind);
  const height = inRows ? chunkRows(columns) : 0;
  const total = rows * columns;
  const chunks = Math.ceil(inRows ? rows / height : total / CHUNK);
  const lengths = side.chain(21, chunks);
  side.finish();
  const end = lengths.reduce((sum, length) => (length < 0 ? NaN : sum + length), 0);
  if (!(2 * end <= data.length)) fail("the chunks of a stream are longer than its payload");
  if (alphabet.split) {
    // Tokens are checked one by one.
  } else if (alphabet.values[0] < layout.low || alphabet.values[size - 1] > layout.high) {
    fail(`a stream holds values beyond ${layout.low} … ${layout.high}`);
  } else if (2 * end < data.length) fail("bytes follow the last chunk of a stream");
  const direct = !prediction && !alphabet.split;
  const meanings = direct ? alphabet.values : alphabet.values.map((_, i) => i);
  const paths = machine(paired ? layout.states : 1) ?? fail("a stream has an unknown trellis");
  const part = { ...layOut(tables, meanings, precision), precision, parities: paired ? 2 : 1, paths };
  const words = words16(data.subarray(0, 2 * end), 16);
  const out = new Int32Array(total);
  const kinds = new Uint8Array(1);
  let begin = 0;
  for (let chunk = 0; chunk < chunks; chunk++) {
    const last = begin + lengths[chunk];
    const first = inRows ? chunk * height * columns : chunk * CHUNK;
    const target = out.subarray(first, inRows ? first + height * columns : first + CHUNK);
    const parts = inRows ? classes.subarray(chunk * height, (chunk + 1) * height) : kinds;
    const width = inRows ? columns : target.length;
    const sound = (paired ? decodePaired : decodePlain)(words, begin, last, parts, width, part, target);
    if (!sound) fail("a coded chunk does not end where it should");
    begin = last;
  }
  if (prediction) addPrediction(prediction, out, rows, columns, zero, size);
  if (alphabet.split) joinTokens(out, data.subarray(2 * end), alphabet.center, layout.low, layout.high);
  else if (prediction) lookUp(out, alphabet.values);
  return { values: out, transposed };
}
