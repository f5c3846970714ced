/** Coder "tiles": rANS of 32 columns of about a thousand rows, a column in a lane (docs/coders.md, "Coder 6"). */

import { chunkRows, machine, takeAlphabet } from "./alphabet.js";
import { fail } from "./bytes.js";
import { takeClasses, takeTables } from "./frequency.js";
import { opened, unzigzag, words16 } from "./numbers.js";

const LANES = 32;
/** Rows of a tile, about. */
const TILE = 1024;

/**
 * Return the nearest integer, the even one of two.
 * @param {number} value
 */
function roundEven(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}

/**
 * Decode a stream of tiles; the array may be transposed.
 * @type {import("./streams.js").Decode}
 */
export function decodeTiles(payload, layout) {
  const { states } = layout;
  const [side, data] = opened(payload);
  const alphabet = takeAlphabet(side);
  const size = alphabet.values.length;
  const span = alphabet.values[size - 1] - alphabet.values[0];
  const raw = side.take(83, 4, "the raw bits of a tile");
  const numbers = Math.floor(size / 2 ** raw);
  const even = numbers * 2 ** raw === size && alphabet.affine && span === size - 1;
  if (alphabet.split || numbers > 256 || (raw && !even)) fail("a stream of tiles has an impossible alphabet");
  if (span >= 1 << 20) fail("the values of a stream of tiles lie too far apart");
  const transposed = side.take(5, Math.abs(states) === 1 ? 1 : 0, "the scan") === 1;
  const [rows, columns] = transposed ? [layout.columns, layout.rows] : [layout.rows, layout.columns];
  if (columns < LANES) fail(`rows of ${columns} in a stream have tiles`);
  const restart = chunkRows(columns);
  const height = restart * Math.max(1, roundEven(TILE / restart));
  const across = Math.ceil(columns / LANES);
  const tiles = Math.ceil(rows / height) * across;
  if (4 * columns * (tiles / across) > data.length) fail("a stream has too few bytes for its tiles");
  const form = side.take(7, states > 1 ? 62 : 30, "the number of classes");
  const paired = form > 31;
  const count = (form & 31) + 1;
  const leftOut = side.take(80, 1, "the rows that are left out");
  if (states < -1 || count > 31 || (leftOut && !alphabet.values.includes(0))) {
    fail("a stream of tiles is described in an impossible way");
  }
  const classes = takeClasses(side, rows, count + leftOut);
  const tables = takeTables(side, paired ? 2 * count : count, numbers, 12);
  const lengths = new Float64Array(tiles);
  for (let i = 0, length = 0; i < tiles; i++) {
    lengths[i] = length += i ? unzigzag(side.number(57)) : side.number(21);
  }
  const tails = side.chain(81, tiles);
  const starts = side.chain(82, tiles);
  side.finish();
  if (tails.some((tail) => tail > 255) || starts.some((start) => start < 1 || start > 16)) {
    fail("a tile of a stream begins or ends in an impossible way");
  }
  if (2 * lengths.reduce((sum, length) => (length < 0 ? NaN : sum + length), 0) !== data.length) {
    fail("the tiles of a stream are not as long as its payload");
  }
  if (alphabet.values[0] < layout.low || alphabet.values[size - 1] > layout.high) {
    fail(`a stream holds values beyond ${layout.low} … ${layout.high}`);
  }
  // A slot: frequency − 1, symbol, offset within the symbol, of 12, 8 and 12 bits.
  const slots = new Int32Array(tables.length << 12);
  let slot = 0;
  for (const table of tables) {
    for (let symbol = 0; symbol < table.length; symbol++) {
      for (let i = 0; i < table[symbol]; i++) slots[slot++] = ((table[symbol] - 1) << 20) | (symbol << 12) | i;
    }
  }
  const values = new Int32Array(256);
  for (let i = 0; i < numbers; i++) values[i] = alphabet.values[i << raw];
  const words = words16(data, LANES);
  const out = new Int32Array(rows * columns);
  const paths = machine(paired ? states : 1) ?? fail("a stream has an unknown trellis");
  let position = 0;
  for (let tile = 0; tile < tiles; tile++) {
    const row = Math.floor(tile / across) * height;
    const column = (tile % across) * LANES;
    const last = position + lengths[tile];
    const some = classes.subarray(row, row + height);
    const place = row * columns + column;
    const width = Math.min(LANES, columns - column);
    const ends = [position, last, tails[tile], 2 ** starts[tile]];
    if (!decodeTile(words, ends, some, count, width, columns, restart, slots, values, raw, paths, out, place)) {
      fail("a tile of a stream does not end where it should");
    }
    position = last;
  }
  for (let row = 0; row < rows; row++) {
    if (classes[row] === count) continue;
    let at = row * columns;
    const end = at + columns;
    while (at < end && !out[at]) at++;
    if (at === end) fail("a row of zeros is coded in a stream");
  }
  return { values: out, transposed };
}

/**
 * Decode a tile; return whether it ends where it should.
 * @param {Uint16Array} words with 32 after the last
 * @param {number[]} ends first word, the one after the last, rows of the tail, state at the end
 * @param {Uint8Array} classes of its rows
 * @param {number} leftOut class of rows without words
 * @param {number} width columns
 * @param {number} stride columns of the array
 * @param {number} restart rows after which paths start again
 * @param {Int32Array} slots
 * @param {Int32Array} values
 * @param {number} raw low bits that are not coded
 * @param {import("./alphabet.js").Machine} paths
 * @param {Int32Array} out
 * @param {number} start index of the tile's first element
 */
function decodeTile(words, ends, classes, leftOut, width, stride, restart, slots, values, raw, paths, out, start) {
  const { shift, flip, plain } = paths;
  const lowBits = (1 << raw) - 1;
  let position = ends[0];
  const last = ends[1];
  if (position + 2 * width > last) return false;
  const x = new Int32Array(LANES);
  const state = new Int32Array(LANES);
  for (let lane = 0; lane < width; lane++, position += 2) x[lane] = (words[position] << 16) | words[position + 1];
  const tail = classes.length - ends[2];
  const size = plain ? 12 : 13;
  for (let row = 0; row < classes.length; row++) {
    if (position > last) return false;
    if (!plain && row % restart === 0) state.fill(0);
    const kind = classes[row];
    const target = start + row * stride;
    if (kind === leftOut) {
      if (!plain)
        for (let lane = 0; lane < width; lane++) state[lane] = (state[lane] >> 1) ^ (-(state[lane] & 1) & shift);
      continue;
    }
    const first = kind << size;
    const takes = row < tail ? 1 : 0;
    for (let lane = 0; lane < width; lane++) {
      const s = state[lane];
      const entry = slots[first + ((s & 1) << 12) + (x[lane] & 4095)];
      const next = (Math.imul((entry >>> 20) + 1, x[lane] >>> 12) + (entry & 4095)) | 0;
      const value = values[(entry >>> 12) & 255] + (next & lowBits);
      out[target + lane] = value;
      if (!plain) state[lane] = (s >> 1) ^ (-(s & 1) & shift) ^ (-(value & 1) & flip);
      const rest = next >>> raw;
      // Whether a word is needed is a coin toss: no branch.
      const need = (((rest >>> 16) - 1) >>> 31) & takes;
      x[lane] = (rest << (need << 4)) | (words[position] & -need);
      position += need;
    }
  }
  return position === last && x.subarray(0, width).every((one) => one === ends[3]);
}
