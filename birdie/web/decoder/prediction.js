/** Linear prediction of symbols by symbols before them (docs/format.md, "Prediction"). */

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
  const { distances, weights, offsets } = prediction;
  const shift = zero - (size >> 1);
  const means = new Int32Array(columns);
  for (let row = 0, at = 0; row < rows; row++) {
    const rate = Math.floor(65536 / (Math.min(row, 1023) + 1));
    for (let column = 0; column < columns; column++, at++) {
      let guess = 0;
      if (distances.length) {
        guess = weights[0][row] * means[column] + 1024;
        for (let k = 0; k < 2; k++) {
          const back = distances[k][row];
          if (back) guess += 256 * weights[k + 1][row] * (symbols[at - back * columns] - zero);
        }
        guess >>= 11;
      } else {
        for (let tap = 0; tap < offsets.length; tap++) {
          const weight = weights[tap][column % weights[tap].length];
          const [up, back] = offsets[tap];
          if (weight && up <= row && back <= column && column - back < columns) {
            guess += weight * (symbols[at - up * columns - back] - zero);
          }
        }
        guess = (guess + 16) >> 5;
      }
      const symbol = symbols[at] + guess + shift;
      symbols[at] = symbol - size * Math.floor(symbol / size);
      if (distances.length) means[column] += Math.floor((((symbols[at] - zero) * 256 - means[column]) * rate) / 65536);
    }
  }
}
