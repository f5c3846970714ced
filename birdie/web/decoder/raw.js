/** Coders without a probability model, and "numbers" (docs/coders.md, "Numbers"). */

import { fail } from "./bytes.js";
import { Numbers, unzigzag } from "./numbers.js";

/** @typedef {import("./streams.js").Layout} Layout */

/**
 * Check that values from `low` to `high` fit a stream.
 * @param {number} low
 * @param {number} high
 * @param {Layout} layout
 */
function requireRange(low, high, layout) {
  if (low < layout.low || high > layout.high) {
    fail(`a stream holds values ${low} … ${high}, beyond ${layout.low} … ${layout.high}`);
  }
}

/**
 * Check that values fit a stream.
 * @param {Int32Array} values not empty
 * @param {Layout} layout
 */
function requireRangeOf(values, layout) {
  let low = values[0];
  let high = values[0];
  for (let i = 1; i < values.length; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  requireRange(low, high, layout);
  return values;
}

/**
 * Return the value of a constant stream: the fewest bytes of two's complement.
 * @param {Uint8Array} payload
 * @param {Layout} layout
 */
export function decodeConstant(payload, layout) {
  const count = payload.length;
  let value = 0;
  for (let i = 0; i < Math.min(count, 4); i++) value |= payload[i] << (8 * i);
  const unused = 32 - 8 * count;
  if (unused > 0 && count) value = (value << unused) >> unused;
  const least = value ? Math.floor((40 - Math.clz32(value < 0 ? ~value : value)) / 8) : 0;
  if (least !== count) fail(`a constant stream has ${count} bytes and needs fewer`);
  requireRange(value, value, layout);
  return Int32Array.of(value);
}

/**
 * Return values of one unsigned byte each.
 * @param {Uint8Array} payload
 * @param {Layout} layout
 */
export function decodeBytes(payload, layout) {
  const { rows, columns } = layout;
  if (payload.length !== rows * columns) fail(`a stream of bytes has ${payload.length}, not ${rows} × ${columns}`);
  return requireRangeOf(new Int32Array(payload), layout);
}

/**
 * Return values of so many bits each above the least.
 * @param {Uint8Array} payload
 * @param {Layout} layout
 */
export function decodePacked(payload, layout) {
  const count = layout.rows * layout.columns;
  const width = payload.length < 5 ? 0 : payload[0];
  if (width < 1 || width > 32 || payload.length !== 5 + Math.ceil((count * width) / 8)) {
    fail(`a packed stream has ${payload.length} bytes for ${layout.rows} × ${layout.columns}`);
  }
  const data = new Uint8Array(payload.length + 8);
  data.set(payload);
  const low = data[1] | (data[2] << 8) | (data[3] << 16) | (data[4] << 24);
  const mask = width < 32 ? (1 << width) - 1 : -1;
  const values = new Int32Array(count);
  for (let i = 0, at = 5, bit = 0; i < count; i++) {
    let word = (data[at] | (data[at + 1] << 8) | (data[at + 2] << 16) | (data[at + 3] << 24)) >>> bit;
    if (bit) word |= data[at + 4] << (32 - bit);
    const value = low + ((word & mask) >>> 0);
    if (value > 2147483647) fail("a packed stream holds values beyond 32 bits");
    values[i] = value;
    bit += width;
    at += bit >> 3;
    bit &= 7;
  }
  return requireRangeOf(values, layout);
}

/**
 * Return values of the coder "numbers".
 * @param {Uint8Array} payload
 * @param {Layout} layout
 */
export function decodeNumbers(payload, layout) {
  const count = layout.rows * layout.columns;
  if (payload.length % 2 || count > 1 << 20) {
    fail(`${layout.rows} × ${layout.columns} numbers cannot have ${payload.length} bytes`);
  }
  const side = new Numbers(payload);
  const running = side.take(0, 1, "the form");
  const center = side.signed(1);
  const numbers = side.chain(2, count, 31);
  side.finish();
  const values = new Int32Array(count);
  let value = center;
  for (let i = 0; i < count; i++) {
    value = unzigzag(numbers[i]) + (running ? value : center);
    requireRange(value, value, layout);
    values[i] = value;
  }
  return values;
}
