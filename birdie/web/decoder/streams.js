/** Streams: arrays of integers, coded (docs/coders.md). */

import { fail } from "./bytes.js";
import { decodeMixed } from "./mixing.js";
import { decodeStatic } from "./rans.js";
import { decodeBytes, decodeConstant, decodeNumbers, decodePacked } from "./raw.js";
import { decodeTiles } from "./tiles.js";

export const CODERS = ["constant", "bytes", "packed", "numbers", "static", "mixed", "tiles"];
/** Operations that a value takes at most, of about a nanosecond, and bytes beside the value itself. */
const COSTS = [0, 1, 64, 128, 64, 800, 64];

/**
 * @typedef {object} Layout shape of a stream, and what its values must fit
 * @property {number} rows
 * @property {number} columns
 * @property {number} low
 * @property {number} high
 * @property {number} states of the trellis on whose paths the numbers lie; 1 for none
 */

/**
 * @typedef {object} Stream
 * @property {Int32Array} values in row-major order; of a constant one value
 * @property {number} step 0 for a constant, else 1: value i is values[i · step]
 */

/**
 * @callback Decode
 * @param {Uint8Array} payload
 * @param {Layout} layout
 * @returns {{ values: Int32Array, transposed: boolean }}
 */

/**
 * Return the layout of a stream.
 * @param {number} rows
 * @param {number} columns
 * @param {number} bits of the integers; negative for signed ones
 * @param {number} [states]
 * @returns {Layout}
 */
export function streamLayout(rows, columns, bits, states = 1) {
  return {
    rows,
    columns,
    low: bits < 0 ? -(2 ** (-bits - 1)) : 0,
    high: 2 ** (bits < 0 ? -bits - 1 : bits) - 1,
    states,
  };
}

/**
 * Return the operations that decoding takes at most, and the bytes of memory.
 * @param {number} coder
 * @param {Layout} layout
 */
export function streamCost(coder, layout) {
  const count = layout.rows * layout.columns;
  return { operations: (COSTS[coder] ?? 0) * count, bytes: coder ? 8 * count : 0 };
}

/**
 * Decode a stream.
 * @param {number} coder
 * @param {Uint8Array} payload
 * @param {Layout} layout
 * @returns {Stream}
 */
export function decodeStream(coder, payload, layout) {
  if (coder >= CODERS.length) fail(`coder ${coder} is unknown here; use a newer birdie`);
  if (!coder) return { values: decodeConstant(payload, layout), step: 0 };
  if (layout.rows * layout.columns === 0) fail(`an empty stream has coder ${coder} and ${payload.length} bytes`);
  if (coder < 4) {
    return { values: [decodeBytes, decodePacked, decodeNumbers][coder - 1](payload, layout), step: 1 };
  }
  const decode = coder === 5 ? decodeMixed : coder === 6 ? decodeTiles : decodeStatic;
  const { values, transposed } = decode(payload, layout);
  return { values: transposed ? transpose(values, layout.rows, layout.columns) : values, step: 1 };
}

/**
 * Return an array (rows, columns) from its transpose.
 * @param {Int32Array} values
 * @param {number} rows
 * @param {number} columns
 */
function transpose(values, rows, columns) {
  const out = new Int32Array(values.length);
  const size = 32;
  for (let top = 0; top < rows; top += size) {
    for (let left = 0; left < columns; left += size) {
      for (let row = top; row < Math.min(top + size, rows); row++) {
        for (let column = left; column < Math.min(left + size, columns); column++) {
          out[row * columns + column] = values[column * rows + row];
        }
      }
    }
  }
  return out;
}
