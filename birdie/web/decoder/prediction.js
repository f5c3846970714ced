/** Linear prediction of symbols by symbols before them (docs/coders.md, "Prediction"). */

import { fail } from "./bytes.js";
import { unzigzag } from "./numbers.js";

/**
 * @typedef {object} Prediction
 * @property {Int32Array[]} distances of rows: of each row to its references; 0 for none. Of taps: none
 * @property {Int32Array[]} weights of rows: of the mean, of each reference. Of taps: of each tap, by position
 * @property {number[][]} offsets of taps: rows up, columns back
 */

/**
 * @param {import("./numbers.js").Numbers} side
 * @param {number} context
 */
function takeWeight(side, context) {
  const weight = unzigzag(side.number(context));
  if (Math.abs(weight) > 127) fail("a weight of a prediction is beyond ±127");
  return weight;
}

/**
 * Read the prediction of an array; null for none.
 * @param {import("./numbers.js").Numbers} side
 * @param {number} rows
 * @param {number} columns
 * @returns {Prediction | null}
 */
export function takePrediction(side, rows, columns) {
  const kind = side.take(22, 2, "the kind of prediction");
  if (!kind) return null;
  if (kind === 1) {
    if (columns < 8) fail(`rows of ${columns} in a stream are predicted from rows`);
    const distances = [58, 59].map((context) => {
      const taken = side.chain(context, rows);
      if (taken.some((distance, row) => distance > row)) fail("a row of a stream refers to one above the first");
      return Int32Array.from(taken);
    });
    const weights = [61, 62, 63].map((context, k) =>
      new Int32Array(rows).map((_, row) => (k && !distances[k - 1][row] ? 0 : takeWeight(side, context))),
    );
    return { distances, weights, offsets: [] };
  }
  const height = side.take(56, 63, "a side of a kernel") + 1;
  const width = side.take(56, 63, "a side of a kernel") + 1;
  const n = height * width;
  if (n > 64) fail(`a stream has a kernel of ${height} × ${width}, which is too large`);
  const across = [1, 2, width, width + 1, width - 1, 2 * width, n, 2 * n, n - 1, n + 1, n - width, n + width];
  const listed = [...across.map((back) => [0, back]), [1, 0], [2, 0], [1, -1], [1, 1], [1, -width], [1, width]];
  const offsets = listed.filter(
    ([up, back], i) => (up || back) && listed.findIndex((one) => one[0] === up && one[1] === back) === i,
  );
  const weights = offsets.map((_, tap) => new Int32Array(n).map(() => takeWeight(side, 64 + tap)));
  return { distances: [], weights, offsets };
}

/**
 * Replace residuals (rows, columns) by the symbols that have them.
 * @param {Prediction} prediction
 * @param {Int32Array} symbols residuals at first
 * @param {number} rows
 * @param {number} columns
 * @param {number} zero the symbol that predictions count from
 * @param {number} size of the alphabet
 */
export function addPrediction(prediction, symbols, rows, columns, zero, size) {
  const add = prediction.distances.length ? addRows : addTaps;
  add(prediction, symbols, rows, columns, zero, size);
}

/**
 * Return the symbol, modulo the size of the alphabet.
 * @param {number} symbol
 * @param {number} size
 */
function wrap(symbol, size) {
  return symbol >= 0 && symbol < size ? symbol : symbol - size * Math.floor(symbol / size);
}

/** @type {typeof addPrediction} */
function addRows({ distances, weights }, symbols, rows, columns, zero, size) {
  const shift = zero - (size >> 1);
  const means = new Int32Array(columns);
  for (let row = 0, at = 0; row < rows; row++) {
    const rate = Math.floor(65536 / (Math.min(row, 1023) + 1)) / 65536;
    const own = weights[0][row];
    const first = distances[0][row] * columns;
    const second = distances[1][row] * columns;
    const one = first ? 256 * weights[1][row] : 0;
    const two = second ? 256 * weights[2][row] : 0;
    for (let column = 0; column < columns; column++, at++) {
      const mean = means[column];
      // Without a reference the symbol itself is read, times 0.
      const guess = own * mean + one * (symbols[at - first] - zero) + two * (symbols[at - second] - zero);
      const symbol = wrap(symbols[at] + ((guess + 1024) >> 11) + shift, size);
      symbols[at] = symbol;
      means[column] = mean + Math.floor(((symbol - zero) * 256 - mean) * rate);
    }
  }
}

/** @type {typeof addPrediction} */
function addTaps({ weights, offsets }, symbols, rows, columns, zero, size) {
  const shift = zero - (size >> 1);
  const positions = weights[0].length;
  // Of each position in the kernel the taps that have a weight.
  const first = new Int32Array(positions + 1);
  /** @type {number[]} */
  const taps = [];
  for (let position = 0; position < positions; position++) {
    offsets.forEach(([up, back], tap) => {
      if (weights[tap][position]) taps.push(up, back, weights[tap][position]);
    });
    first[position + 1] = taps.length;
  }
  const listed = Int32Array.from(taps);
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0, position = 0; column < columns; column++, at++) {
      let guess = 16;
      for (let tap = first[position]; tap < first[position + 1]; tap += 3) {
        const up = listed[tap];
        const source = column - listed[tap + 1];
        if (up <= row && source >= 0 && source < columns) {
          guess += listed[tap + 2] * (symbols[at - up * columns - listed[tap + 1]] - zero);
        }
      }
      symbols[at] = wrap(symbols[at] + (guess >> 5) + shift, size);
      position = position + 1 < positions ? position + 1 : 0;
    }
  }
}
