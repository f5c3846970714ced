/** What symbols stand for, and trellis paths (docs/coders.md, "Side information of coder 4"; docs/format.md, "Trellis"). */

import { fail } from "./bytes.js";
import { unzigzag } from "./numbers.js";

const TOKENS = 256 + 26 * 8;

/**
 * @typedef {object} Alphabet
 * @property {boolean} split symbols are tokens, which low bits complete
 * @property {boolean} affine values are evenly spaced
 * @property {number} center of a split alphabet
 * @property {Int32Array} values of each symbol; of a split alphabet the tokens
 */

/**
 * Read an alphabet.
 * @param {import("./numbers.js").Numbers} side
 * @returns {Alphabet}
 */
export function takeAlphabet(side) {
  const kind = side.take(0, 2, "the kind of an alphabet");
  const low = side.signed(1);
  if (kind === 2) {
    return { split: true, affine: false, center: low, values: new Int32Array(TOKENS).map((_, i) => i) };
  }
  const size = side.take(3, 4095, "the size of an alphabet") + 1;
  const values = new Int32Array(size);
  const step = kind ? 0 : side.take(2, 2 ** 32, "the step of an alphabet") + 1;
  let value = low;
  for (let i = 0; i < size; i++) {
    if (i) value += step || side.number(4) + 1;
    values[i] = value;
  }
  if (low < -(2 ** 31) || value >= 2 ** 31) fail("an alphabet reaches beyond 32 bits");
  return { split: false, affine: !kind, center: 0, values };
}

/**
 * Replace symbols by their values.
 * @param {Int32Array} symbols
 * @param {Int32Array} values
 */
export function lookUp(symbols, values) {
  for (let i = 0; i < symbols.length; i++) symbols[i] = values[symbols[i]];
}

/**
 * Replace tokens by their values.
 * @param {Int32Array} tokens
 * @param {Uint8Array} low bits that the tokens leave open
 * @param {number} center
 * @param {number} least
 * @param {number} most values are within
 */
export function joinTokens(tokens, low, center, least, most) {
  let byte = 0;
  let bit = 0;
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i];
    let width = token < 256 ? 0 : ((token - 256) >> 3) + 5;
    let number = token < 256 ? token : 8 + (token & 7);
    number *= 2 ** width;
    for (let unit = 1; width; width--, unit *= 2) {
      if (byte === low.length) fail("a stream has too few low bits");
      if ((low[byte] >> bit) & 1) number += unit;
      bit = (bit + 1) & 7;
      if (!bit) byte++;
    }
    const value = unzigzag(number) + center;
    if (value < least || value > most) fail(`a stream holds ${value}, beyond ${least} … ${most}`);
    tokens[i] = value;
  }
  if (byte + (bit ? 1 : 0) !== low.length) fail("a stream has too many low bits");
}

/** Symbols that are coded independently of all others. */
export const CHUNK = 1 << 20;

/**
 * Return the rows of a chunk, at whose multiples paths start again.
 * @param {number} columns
 */
export function chunkRows(columns) {
  return Math.max(1, Math.floor(CHUNK / Math.max(columns, 1)));
}

const POLYNOMIALS = new Map([
  [1, [0o1, 0o0]],
  [4, [0o5, 0o2]],
  [8, [0o13, 0o4]],
  [16, [0o23, 0o4]],
  [32, [0o45, 0o10]],
  [64, [0o103, 0o24]],
  [128, [0o251, 0o106]],
  [256, [0o467, 0o242]],
]);

/**
 * @typedef {object} Machine
 * @property {number} shift the next state is s >> 1 ^ (s odd ? shift : 0) ^ (number odd ? flip : 0)
 * @property {number} flip
 * @property {number} mask column c is on path c & mask
 * @property {boolean} plain there is one state
 */

/**
 * Return the machine of a trellis; undefined for an unknown number of states.
 * @param {number} states negative for a path along rows
 * @returns {Machine | undefined}
 */
export function machine(states) {
  const parts = POLYNOMIALS.get(Math.abs(states));
  return (
    parts && { shift: parts[0] >> 1, flip: parts[1] >> 1, mask: states > 0 ? -1 : 0, plain: Math.abs(states) === 1 }
  );
}
