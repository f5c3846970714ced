/** Frequency tables of symbols and classes of rows (docs/coders.md, "Tables"). */

import { fail } from "./bytes.js";
import { unzigzag } from "./numbers.js";

/** 2**(23 + i/16), rounded: significands of the steps of grids, and, of 16 bits, powers of frequencies. */
export const SIXTEENTHS = [
  8388608, 8760003, 9147842, 9552851, 9975792, 10417458, 10878679, 11360319, 11863283, 12388516, 12937002, 13509772,
  14107901, 14732511, 15384775, 16065917,
];

const MAX_LOG = 384;

/** @returns {never} */
function impossible() {
  return fail("a frequency table of a stream is impossible");
}

/**
 * Return (numerator · 2**precision + denominator // 2) // denominator.
 * @param {number} numerator
 * @param {number} precision
 * @param {number} denominator at least the numerator
 */
function share(numerator, precision, denominator) {
  const scaled = numerator * 2 ** precision;
  if (denominator * 2 ** precision < 2 ** 52) {
    return Math.floor((scaled + Math.floor(denominator / 2)) / denominator);
  }
  const divisor = BigInt(denominator);
  return Number((BigInt(scaled) + divisor / 2n) / divisor);
}

/**
 * Read one table of `size` symbols; its frequencies sum to 2**precision.
 * @param {import("./numbers.js").Numbers} side
 * @param {number} size
 * @param {number} precision
 */
function takeTable(side, size, precision) {
  const low = side.number(8);
  const high = size - 1 - side.number(8);
  const form = side.number(9);
  if (low > high || form >= 45) impossible();
  const stride = Math.floor(form / 5);
  const coarseness = form % 5;
  const width = high - low + 1;
  const knots = new Int32Array(((width - 1 + (1 << stride) - 1) >> stride) + 1);
  let knot = 0;
  let slope = 0;
  let number = 0;
  for (let i = 0; i < knots.length; i++) {
    number = side.number(!stride ? 13 + Math.min(number, 3) : i < 2 ? 10 + i : 12);
    const step = unzigzag(number);
    if (!stride) knot += step;
    else if (i) knot += slope += step;
    else knot = number;
    if (!(knot >= 0 && knot <= MAX_LOG)) impossible();
    knots[i] = knot;
  }
  const logs = new Float64Array(width);
  for (let i = 0; i < width; i++) {
    let left = knots[i >> stride] << coarseness;
    if (stride) {
      const right = knots[Math.min((i >> stride) + 1, knots.length - 1)] << coarseness;
      left += ((right - left) * (i & ((1 << stride) - 1)) + (1 << (stride - 1))) >> stride;
    }
    logs[i] = left;
  }
  const spikes = side.take(17, 16, "the number of spikes");
  for (let i = 0, symbol = 0; i < spikes; i++) {
    symbol += side.number(18);
    if (symbol >= width) impossible();
    logs[symbol] = Math.max(logs[symbol] + side.signed(19), stride ? 0 : 1);
  }
  const table = new Int32Array(size);
  const present = [];
  let total = 0;
  for (let i = 0; i < width; i++) {
    if (logs[i] > MAX_LOG) impossible();
    if (stride || logs[i] > 0) {
      logs[i] = (SIXTEENTHS[logs[i] & 15] >> 8) * 2 ** (logs[i] >> 4);
      total += logs[i];
      present.push(i);
    }
  }
  let rest = 2 ** precision;
  if (!present.length || present.length > rest) impossible();
  for (const i of present) rest -= table[low + i] = Math.max(share(logs[i], precision, total), 1);
  if (rest) {
    const order = present.map((i) => low + i).sort((a, b) => table[b] - table[a] || a - b);
    const step = rest > 0 ? 1 : -1;
    while (rest) {
      for (const symbol of order) {
        if (rest && (step > 0 || table[symbol] > 1)) {
          table[symbol] += step;
          rest -= step;
        }
      }
    }
  }
  return table;
}

/**
 * Read `count` tables.
 * @param {import("./numbers.js").Numbers} side
 * @param {number} count
 * @param {number} size of the alphabet
 * @param {number} precision
 */
export function takeTables(side, count, size, precision) {
  return Array.from({ length: count }, () => takeTable(side, size, precision));
}

/**
 * Read the class of each row, of `count` classes.
 * @param {import("./numbers.js").Numbers} side
 * @param {number} rows
 * @param {number} count
 */
export function takeClasses(side, rows, count) {
  const classes = new Uint8Array(rows);
  if (count < 2) return classes;
  side.chain(24, rows, 31).forEach((kind, row) => {
    if (kind >= count) fail(`a row of a stream has class ${kind} of ${count}`);
    classes[row] = kind;
  });
  return classes;
}
