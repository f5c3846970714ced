/** Tables of context mixing (docs/coders.md, "Tables of coder 5").
 *
 * Floats suffice: no entry lies nearer than 10⁻¹² of itself to where it would be rounded otherwise, and exp and log of
 * any engine are right to 10⁻¹⁵. A test holds the hashes of docs/coders.md and this margin.
 */

export const LIMIT = 2047;
export const SCALES = 384;

/**
 * @param {number} value
 * @param {number} least
 * @param {number} most
 */
export function clip(value, least, most) {
  return value < least ? least : value > most ? most : value;
}

/** Return 2**(sixteenths/16), exact for whole powers. @param {number} sixteenths */
function power(sixteenths) {
  return 2 ** Math.floor(sixteenths / 16) * Math.exp(((((sixteenths % 16) + 16) % 16) * Math.LN2) / 16);
}

/**
 * @typedef {object} Tables
 * @property {Int32Array} squash probability in 1/65,536 of a logit + 2,048
 * @property {Int32Array} stretch logit of a probability in 1/4,096
 * @property {Int32Array} log2 16 · log2(1 + (2i + 1)/512)
 * @property {Float64Array} power 2**(i/16)
 * @property {Float64Array} inverse 2**(22 − i/16)
 * @property {Int32Array} adaptation 65,536 / (n + 1.6)
 */

/** @returns {Tables} */
function makeTables() {
  const squash = new Int32Array(4096).map((_, i) =>
    clip(Math.round(65536 / (1 + Math.exp((2048 - i) / 170))), 8, 65528),
  );
  const stretch = new Int32Array(4096);
  for (let i = 0, x = 0; i < 2048; i++) {
    const middle = 16 * i + 8;
    while (squash[x + 1] <= middle) x++;
    stretch[i] = (middle - squash[x] <= squash[x + 1] - middle ? x : x + 1) - 2048;
    stretch[4095 - i] = -stretch[i];
  }
  return {
    squash,
    stretch,
    log2: new Int32Array(256).map((_, i) => Math.round(16 * Math.log2(1 + (2 * i + 1) / 512))),
    power: new Float64Array(SCALES).map((_, i) => Math.floor(power(i))),
    inverse: new Float64Array(SCALES).map((_, i) => Math.max(1, Math.floor(power(352 - i)))),
    adaptation: new Int32Array(1024).map((_, i) => Math.floor(655360 / (10 * i + 16))),
  };
}

const DENSITIES = [
  (/** @type {number} */ x) => Math.exp((-x * x) / Math.PI),
  (/** @type {number} */ x) => (2 / (2 ** x + 2 ** -x)) ** 2,
  (/** @type {number} */ x) => Math.exp(-x),
];

/** @param {number} prior */
function makePrior(prior) {
  const half = Array.from({ length: 2048 }, (_, k) => DENSITIES[prior]((2 * k + 1) / 512));
  const total = 2 * half.reduce((sum, mass) => sum + mass, 0);
  const table = new Float64Array(4097);
  for (let i = 1, sum = 0; i <= 4096; i++) {
    sum += half[i <= 2048 ? 2048 - i : i - 2049];
    // The sums of both halves and the end are exact fractions.
    table[i] = Math.floor(i === 4096 ? 2 ** 20 : i === 2048 ? 2 ** 19 : (2 ** 20 * sum) / total) + i;
  }
  return table;
}

/** @type {Tables | undefined} */
let made;
/** @type {Float64Array[]} */
const priors = [];

/** Return all tables but the priors. */
export function tables() {
  return (made ??= makeTables());
}

/**
 * Return the distribution function of a prior: 0 Gaussian, 1 logistic, 2 Laplace.
 * @param {number} prior
 */
export function priorOf(prior) {
  return (priors[prior] ??= makePrior(prior));
}
