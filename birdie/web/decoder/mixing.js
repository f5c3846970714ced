/** Coder "mixed": context mixing (docs/coders.md, "Coder 5" and what follows it).
 *
 * All values are integers. Those beyond 32 bits are held in floats, which are exact below 2**53, or in two halves.
 */

import { chunkRows, lookUp, machine, takeAlphabet } from "./alphabet.js";
import { fail } from "./bytes.js";
import { LIMIT, SCALES, clip, priorOf, tables } from "./mixing_tables.js";
import { opened } from "./numbers.js";
import { addPrediction, takePrediction } from "./prediction.js";
import { decodePacked } from "./raw.js";

const CONTEXTS = 192;
const FINE = 64;
const SETS = 64;
const BUCKETS = 33;
// One array holds all that a bit reads and learns: its inner loop has few registers to spare.
const SQUASH = 0;
const STRETCH = SQUASH + 4096;
const ADAPTATION = STRETCH + 4096;
const APM = ADAPTATION + 1024;
/** Weights of two mixers, in sets of 8. */
const WEIGHTS = APM + SETS * BUCKETS;
/** Of each node: its weights, the first bucket of its APM, then by bit the next node, or −1 − symbol. */
const TREE = WEIGHTS + 16 * SETS;
/** High and low halves of code and width, and the next word. */
const CODER = TREE + 4 * 511;
/** Counters, a probability of 22 bits over a count of 10, then logits of priors. */
const COUNTERS = CODER + 5;
const FIRST_WEIGHTS = [4915, 4915, 4915, 4915, 4915, 4915, 21299, 14746];
const UNIT = 1 / 65536;
/** Sums up to which every product is exact. */
const EXACT = 2 ** 36;

/**
 * @typedef {object} Model
 * @property {number} zero
 * @property {number} scale
 * @property {number} rowCount
 * @property {number} columnCount pseudo-counts
 * @property {import("./alphabet.js").Machine} paths
 * @property {Uint8Array} parity of the value of each symbol
 * @property {number} nodes
 * @property {Int32Array} memory what a chunk starts from
 */

/**
 * Split the alphabet into halves of about equal mass, again and again: low, split, high and depth of each node.
 * @param {Float64Array} masses
 */
function growTree(masses) {
  const sums = new Float64Array(masses.length + 1);
  masses.forEach((mass, i) => {
    sums[i + 1] = sums[i] + mass;
  });
  const nodes = [{ low: 0, split: 0, high: masses.length - 1, depth: 0 }];
  const children = new Int32Array(2 * masses.length - 2);
  for (let node = 0; node < nodes.length; node++) {
    const { low, high, depth } = nodes[node];
    const twice = sums[low] + sums[high + 1];
    let split = low;
    while (split < high - 1 && 2 * sums[split + 1] < twice) split++;
    if (split > low && twice - 2 * sums[split] < 2 * sums[split + 1] - twice) split--;
    nodes[node].split = split;
    [
      [low, split],
      [split + 1, high],
    ].forEach(([start, stop], side) => {
      children[2 * node + side] = start === stop ? -1 - start : nodes.length;
      if (start < stop) nodes.push({ low: start, split: 0, high: stop, depth: depth + 1 });
    });
  }
  return { nodes, children };
}

/**
 * Return what chunks start from.
 * @param {number} size symbols
 * @param {number} zero
 * @param {number} scale
 * @param {number} prior
 * @param {number[]} pseudo logs of the pseudo-counts
 * @param {import("./alphabet.js").Machine} paths
 * @param {Uint8Array} parity
 * @returns {Model}
 */
function makeModel(size, zero, scale, prior, pseudo, paths, parity) {
  const { inverse, stretch, squash, adaptation } = tables();
  const cdf = priorOf(prior);
  /** @param {number} position @param {number} fine */
  const below = (position, fine) => cdf[clip(Math.floor((position * inverse[fine]) / 16384) + 2048, 0, 4096)];
  const masses = new Float64Array(size).map((_, symbol) => {
    const middle = 64 * (symbol - zero);
    return below(middle + 32, scale) - below(middle - 32, scale) + 2;
  });
  const { nodes, children } = growTree(masses);
  const count = nodes.length;
  const parities = paths.plain ? 1 : 2;
  const memory = new Int32Array(COUNTERS + (CONTEXTS + FINE) * parities * count);
  memory.set(squash, SQUASH);
  memory.set(stretch, STRETCH);
  memory.set(adaptation, ADAPTATION);
  for (let i = 0; i < SETS * BUCKETS; i++) {
    memory[APM + i] = (squash[clip(128 * ((i % BUCKETS) - 16), -LIMIT, LIMIT) + 2048] << 16) | 6;
  }
  for (let i = 0; i < 16 * SETS; i++) memory[WEIGHTS + i] = FIRST_WEIGHTS[i & 7];
  nodes.forEach(({ depth }, node) => {
    const set = node < 48 ? node : Math.min(48 + depth, 63);
    const next = children.subarray(2 * node, 2 * node + 2);
    memory.set([WEIGHTS + 8 * set, APM + BUCKETS * set, ...next], TREE + 4 * node);
  });
  const counters = memory.subarray(COUNTERS);
  const priors = counters.subarray(CONTEXTS * parities * count);
  for (let fine = 0; fine < FINE; fine++) {
    const at = clip(scale + 2 * fine - FINE, 0, SCALES - 1);
    for (let odd = 0; odd < parities; odd++) {
      for (let node = 0; node < count; node++) {
        const { low, split, high } = nodes[node];
        const first = low ? below(64 * (low - zero) - 32 + 32 * odd, at) : 0;
        const middle = below(64 * (split - zero) + 32 + 32 * odd, at);
        const last = high < size - 1 ? below(64 * (high - zero) + 32 + 32 * odd, at) : cdf[4096];
        const exact = last > first ? Math.floor((2 ** 22 * (last - middle)) / (last - first)) : 2 ** 21;
        const probability = clip(exact, 2 ** 12, 2 ** 22 - 2 ** 12);
        priors[(fine * parities + odd) * count + node] = stretch[probability >> 10];
        const counter = (probability << 10) | 3;
        if (fine === 32) {
          for (let x = FINE; x < CONTEXTS; x++) counters[(x * parities + odd) * count + node] = counter;
        }
        if (fine % 4 === 0) {
          for (let x = fine / 4; x < FINE; x += 16) counters[(x * parities + odd) * count + node] = counter;
        }
      }
    }
  }
  const [rowCount, columnCount] = pseudo.map((log) => 2 ** log);
  return { zero, scale, rowCount, columnCount, paths, parity, nodes: count, memory };
}

const bits = new Float64Array(1);
const halves = new Int32Array(bits.buffer);

/**
 * Return 16 · log2 of a positive integer.
 * @param {number} value
 * @param {Int32Array} log2
 */
function logOf(value, log2) {
  bits[0] = value;
  const high = halves[1];
  return ((high >> 20) - 1023) * 16 + log2[(high >> 12) & 255];
}

/**
 * Return (a · b) >> 16, of integers whose product may be beyond 2**53.
 * @param {number} a
 * @param {number} b below 2**36
 */
function scaled(a, b) {
  const high = Math.floor(a * UNIT);
  return high * b + Math.floor((a - high * 65536) * b * UNIT);
}

/**
 * Move a counter towards a bit.
 * @param {Int32Array} memory
 * @param {number} index
 * @param {number} counter its value
 * @param {number} target 2**22 − 1 for a 1, or 0
 */
function learn(memory, index, counter, target) {
  const n = counter & 1023;
  const step = target - (counter >>> 10);
  const share = memory[ADAPTATION + n];
  // (step · share) >> 16 in 32 bits, and the sum above the count.
  const moved = (Math.imul(step >> 8, share) + (Math.imul(step & 255, share) >> 8)) >> 8;
  memory[index] = counter + (moved << 10) + (n < 1000 ? 1 : 0);
}

/**
 * Decode a symbol: from the root of the tree, at each node a bit is predicted, decoded, and learned from.
 * @param {Int32Array} memory
 * @param {Uint32Array} words
 * @param {number} rate
 * @param {number} b first weight of the second mixer
 * @param {number} s0 where the counters of each context begin
 * @param {number} s1
 * @param {number} s2
 * @param {number} s3
 * @param {number} s4
 * @param {number} s5
 * @param {number} s6 where the logits of the priors begin
 * @param {number} s7
 */
function decodeSymbol(memory, words, rate, b, s0, s1, s2, s3, s4, s5, s6, s7) {
  let codeHigh = memory[CODER];
  let codeLow = memory[CODER + 1];
  let widthHigh = memory[CODER + 2];
  let widthLow = memory[CODER + 3];
  let node = 0;
  do {
    const c0 = memory[s0 + node];
    const c1 = memory[s1 + node];
    const c2 = memory[s2 + node];
    const c3 = memory[s3 + node];
    const c4 = memory[s4 + node];
    const c5 = memory[s5 + node];
    const l0 = memory[STRETCH + (c0 >>> 20)];
    const l1 = memory[STRETCH + (c1 >>> 20)];
    const l2 = memory[STRETCH + (c2 >>> 20)];
    const l3 = memory[STRETCH + (c3 >>> 20)];
    const l4 = memory[STRETCH + (c4 >>> 20)];
    const l5 = memory[STRETCH + (c5 >>> 20)];
    const l6 = memory[s6 + node];
    const l7 = memory[s7 + node];
    const a = memory[TREE + 4 * node];
    const a0 = memory[a];
    const a1 = memory[a + 1];
    const a2 = memory[a + 2];
    const a3 = memory[a + 3];
    const a4 = memory[a + 4];
    const a5 = memory[a + 5];
    const a6 = memory[a + 6];
    const a7 = memory[a + 7];
    const b0 = memory[b];
    const b1 = memory[b + 1];
    const b2 = memory[b + 2];
    const b3 = memory[b + 3];
    const b4 = memory[b + 4];
    const b5 = memory[b + 5];
    const b6 = memory[b + 6];
    const b7 = memory[b + 7];
    // (Σ weight · logit) >> 16, in halves of weights: no sum is beyond 32 bits. Functions would take 1.6 times as long:
    // engines inline few into one.
    let y1 =
      (Math.imul(a0 >> 16, l0) + Math.imul(a1 >> 16, l1) + Math.imul(a2 >> 16, l2) + Math.imul(a3 >> 16, l3) +
        Math.imul(a4 >> 16, l4) + Math.imul(a5 >> 16, l5) + Math.imul(a6 >> 16, l6) + Math.imul(a7 >> 16, l7) +
        ((Math.imul(a0 & 65535, l0) + Math.imul(a1 & 65535, l1) + Math.imul(a2 & 65535, l2) +
          Math.imul(a3 & 65535, l3) + Math.imul(a4 & 65535, l4) + Math.imul(a5 & 65535, l5) +
          Math.imul(a6 & 65535, l6) + Math.imul(a7 & 65535, l7)) >> 16)) |
      0;
    let y2 =
      (Math.imul(b0 >> 16, l0) + Math.imul(b1 >> 16, l1) + Math.imul(b2 >> 16, l2) + Math.imul(b3 >> 16, l3) +
        Math.imul(b4 >> 16, l4) + Math.imul(b5 >> 16, l5) + Math.imul(b6 >> 16, l6) + Math.imul(b7 >> 16, l7) +
        ((Math.imul(b0 & 65535, l0) + Math.imul(b1 & 65535, l1) + Math.imul(b2 & 65535, l2) +
          Math.imul(b3 & 65535, l3) + Math.imul(b4 & 65535, l4) + Math.imul(b5 & 65535, l5) +
          Math.imul(b6 & 65535, l6) + Math.imul(b7 & 65535, l7)) >> 16)) |
      0;
    y1 = (y1 < -LIMIT ? -LIMIT : y1 > LIMIT ? LIMIT : y1) + 2048;
    y2 = (y2 < -LIMIT ? -LIMIT : y2 > LIMIT ? LIMIT : y2) + 2048;
    const mean = (y1 + y2) >> 1;
    const part = mean & 127;
    const bucket = memory[TREE + 1 + 4 * node] + (mean >> 7);
    const refined = (Math.imul(memory[bucket] >>> 16, 128 - part) + Math.imul(memory[bucket + 1] >>> 16, part)) >> 7;
    let odds = (3 * memory[SQUASH + mean] + refined) >> 2;
    odds = odds < 8 ? 8 : odds > 65528 ? 65528 : odds;
    // bound = (width >> 16) · odds, in digits of 16 bits.
    const p0 = Math.imul(widthLow >>> 16, odds);
    const p1 = Math.imul(widthHigh & 65535, odds);
    const sum = (p0 >>> 16) + (p1 & 65535);
    const boundLow = (sum << 16) | (p0 & 65535);
    const boundHigh = (Math.imul(widthHigh >>> 16, odds) + (p1 >>> 16) + (sum >>> 16)) | 0;
    const isBelow = codeLow >>> 0 < boundLow >>> 0 ? 1 : 0;
    let bit = 1;
    if (codeHigh === boundHigh ? isBelow : codeHigh >>> 0 < boundHigh >>> 0) {
      widthHigh = boundHigh;
      widthLow = boundLow;
    } else {
      bit = 0;
      codeHigh = (codeHigh - boundHigh - isBelow) | 0;
      codeLow = (codeLow - boundLow) | 0;
      widthHigh = (widthHigh - boundHigh - (widthLow >>> 0 < boundLow >>> 0 ? 1 : 0)) | 0;
      widthLow = (widthLow - boundLow) | 0;
    }
    if (widthHigh === 0) {
      widthHigh = widthLow;
      widthLow = 0;
      codeHigh = codeLow;
      const position = memory[CODER + 4]++;
      codeLow = position < words.length ? words[position] | 0 : 0;
    }
    const e1 = Math.imul((bit << 16) - memory[SQUASH + y1], rate) >> 4;
    memory[a] = a0 + ((Math.imul(l0, e1) + 16384) >> 15);
    memory[a + 1] = a1 + ((Math.imul(l1, e1) + 16384) >> 15);
    memory[a + 2] = a2 + ((Math.imul(l2, e1) + 16384) >> 15);
    memory[a + 3] = a3 + ((Math.imul(l3, e1) + 16384) >> 15);
    memory[a + 4] = a4 + ((Math.imul(l4, e1) + 16384) >> 15);
    memory[a + 5] = a5 + ((Math.imul(l5, e1) + 16384) >> 15);
    memory[a + 6] = a6 + ((Math.imul(l6, e1) + 16384) >> 15);
    memory[a + 7] = a7 + ((Math.imul(l7, e1) + 16384) >> 15);
    const e2 = Math.imul((bit << 16) - memory[SQUASH + y2], rate) >> 4;
    memory[b] = b0 + ((Math.imul(l0, e2) + 16384) >> 15);
    memory[b + 1] = b1 + ((Math.imul(l1, e2) + 16384) >> 15);
    memory[b + 2] = b2 + ((Math.imul(l2, e2) + 16384) >> 15);
    memory[b + 3] = b3 + ((Math.imul(l3, e2) + 16384) >> 15);
    memory[b + 4] = b4 + ((Math.imul(l4, e2) + 16384) >> 15);
    memory[b + 5] = b5 + ((Math.imul(l5, e2) + 16384) >> 15);
    memory[b + 6] = b6 + ((Math.imul(l6, e2) + 16384) >> 15);
    memory[b + 7] = b7 + ((Math.imul(l7, e2) + 16384) >> 15);
    const nearest = bucket + (part >> 6);
    const old = memory[nearest];
    const seen = old & 65535;
    const moved = Math.imul(((-bit & 65535) - (old >>> 16)) | 0, memory[ADAPTATION + seen]) >> 16;
    memory[nearest] = old + (moved << 16) + (seen < 250 ? 1 : 0);
    const target = -bit & 4194303;
    learn(memory, s0 + node, c0, target);
    learn(memory, s1 + node, c1, target);
    learn(memory, s2 + node, c2, target);
    learn(memory, s3 + node, c3, target);
    learn(memory, s4 + node, c4, target);
    learn(memory, s5 + node, c5, target);
    node = memory[TREE + 2 + 4 * node + bit];
  } while (node >= 0);
  memory[CODER] = codeHigh;
  memory[CODER + 1] = codeLow;
  memory[CODER + 2] = widthHigh;
  memory[CODER + 3] = widthLow;
  return -1 - node;
}

/** Local scales, which learn from each row. An energy is a mean square, in 1/64 of a squared symbol. */
class Scales {
  /**
   * @param {Model} model
   * @param {number} rows
   * @param {number} columns
   */
  constructor(model, rows, columns) {
    const { log2, power } = tables();
    const mean = power[model.scale] + 1;
    this.base = model.scale - FINE;
    this.cap = 2 * (Math.floor(mean / 16) + 2);
    this.energy = Math.floor((mean * mean * 25) / 1024) + 1;
    this.nearest = Math.floor(mean / 4) + 1;
    // Columns of a single row never learn: they share one entry.
    const entries = rows > 1 ? columns : 1;
    const first = ((logOf(this.energy, log2) + 86) >> 1) - this.base;
    this.slow = new Float64Array(entries).fill(this.energy);
    this.fast = new Float64Array(entries).fill(this.energy);
    this.slowScale = new Int32Array(entries).fill(first);
    this.fastScale = new Int32Array(entries).fill(first);
    this.magnitudes = new Int32Array(columns);
    this.states = new Uint8Array(columns);
    this.rowLevel = this.energy;
    this.columnLevel = this.energy;
    this.rowSum = 0;
    this.expectedSum = 0;
  }

  /**
   * Let the columns learn from a complete row.
   * @param {Model} model
   * @param {number} row
   */
  learn({ rowCount, columnCount }, row) {
    const { slow, fast, magnitudes, cap, rowSum, expectedSum, rowLevel, base } = this;
    const { log2, adaptation } = tables();
    const columns = magnitudes.length;
    if (!(rowSum < 2 ** 52 && expectedSum < 2 ** 52)) {
      fail("a stream with scales beyond 52 bits is not decoded here; use birdie");
    }
    const isSmall = expectedSum < EXACT && rowSum < EXACT;
    const normalize = isSmall
      ? Math.floor((65536 * (expectedSum + 64)) / (rowSum + 64))
      : Number((BigInt(expectedSum + 64) * 65536n) / BigInt(rowSum + 64));
    this.rowLevel = row
      ? Math.floor((7 * rowLevel + Math.floor((rowSum - rowCount * rowLevel) / columns)) / 8) + 1
      : Math.floor(rowSum / (columns + rowCount)) + 1;
    const slowRate = adaptation[Math.min(row + columnCount, 1023)];
    const fastRate = adaptation[Math.min(row + columnCount, Math.max(30, columnCount), 1023)];
    let total = 0;
    for (let column = 0; column < columns; column++) {
      const held = Math.min(magnitudes[column], cap);
      const own = 16 * held * held;
      const g = (isSmall ? Math.floor(own * normalize * UNIT) : scaled(normalize, own)) + 1;
      const slowStep = g - slow[column];
      const fastStep = g - fast[column];
      slow[column] += isSmall ? Math.floor(slowStep * slowRate * UNIT) : scaled(slowStep, slowRate);
      fast[column] += isSmall ? Math.floor(fastStep * fastRate * UNIT) : scaled(fastStep, fastRate);
      total += slow[column];
      this.slowScale[column] = ((logOf(slow[column], log2) + 86) >> 1) - base;
      this.fastScale[column] = ((logOf(fast[column], log2) + 86) >> 1) - base;
    }
    this.columnLevel = Math.floor(total / columns) + 1;
  }
}

/**
 * Decode a row of a chunk.
 * @param {Int32Array} memory
 * @param {Uint32Array} words
 * @param {Model} model
 * @param {Scales} scales
 * @param {number} band first context of its regions
 * @param {number} rate
 * @param {Int32Array} out symbols
 * @param {number} at
 */
function decodeRow(memory, words, model, scales, band, rate, out, at) {
  const { zero, rowCount, parity, paths, nodes } = model;
  const { slow, slowScale, fastScale, magnitudes, states, base, cap, nearest } = scales;
  const { log2 } = tables();
  const { shift, flip, mask: pathMask } = paths;
  const columns = magnitudes.length;
  const stride = paths.plain ? nodes : 2 * nodes;
  const priors = COUNTERS + CONTEXTS * stride;
  const mask = slow.length > 1 ? -1 : 0;
  const rowScale = ((logOf(scales.rowLevel, log2) + 86) >> 1) - base;
  let rowSum = rowCount * scales.rowLevel;
  let expectedSum = rowCount * scales.columnLevel;
  let left = 0;
  let left2 = 0;
  for (let column = 0; column < columns; column++) {
    const state = states[column & pathMask];
    const odd = state & 1;
    const first = COUNTERS + (odd ? nodes : 0);
    const entry = column & mask;
    const row = (logOf(rowSum, log2) - logOf(expectedSum, log2)) >> 1;
    const product = slowScale[entry] + row;
    const quick = fastScale[entry] + row;
    const near = logOf(((13 * (2 * left + left2 + 2 * magnitudes[column])) >> 1) + nearest, log2) - base;
    const coarse = clip((product + 4) >> 3, 0, 15);
    const symbol = decodeSymbol(
      memory,
      words,
      rate,
      WEIGHTS + 8 * (SETS + coarse),
      first + coarse * stride,
      first + (16 + clip((row + rowScale + 4) >> 3, 0, 15)) * stride,
      first + (32 + clip((quick + 4) >> 3, 0, 15)) * stride,
      first + (48 + clip((3 * product + near + 16) >> 5, 0, 15)) * stride,
      first + (64 + clip((slowScale[entry] + 1) >> 1, 0, 63)) * stride,
      first + (band + 8 * Math.floor((8 * column) / columns)) * stride,
      first - COUNTERS + priors + clip((product + 1) >> 1, 0, 63) * stride,
      first - COUNTERS + priors + clip((quick + 1) >> 1, 0, 63) * stride,
    );
    out[at++] = symbol;
    left2 = left;
    left = Math.abs(2 * (symbol - zero) + odd);
    magnitudes[column] = left;
    states[column & pathMask] = (state >> 1) ^ (-odd & shift) ^ (-parity[symbol] & flip);
    const held = left < cap ? left : cap;
    rowSum += 16 * held * held;
    expectedSum += slow[entry];
  }
  scales.rowSum = rowSum;
  scales.expectedSum = expectedSum;
}

/**
 * Decode a chunk.
 * @param {Uint32Array} words
 * @param {Model} model
 * @param {number} rows
 * @param {number} columns
 * @param {Int32Array} out symbols
 */
function decodeChunk(words, model, rows, columns, out) {
  const memory = model.memory.slice();
  memory.set([words.length ? words[0] : 0, words.length > 1 ? words[1] : 0, -1, -1, 2], CODER);
  const scales = new Scales(model, rows, columns);
  for (let row = 0; row < rows; row++) {
    const rate = Math.max(8, 24 - Math.floor((row * columns) / 4000));
    const band = 128 + Math.floor((8 * row) / rows);
    decodeRow(memory, words, model, scales, band, rate, out, row * columns);
    if (row < rows - 1) scales.learn(model, row);
  }
  if (words.length > memory[CODER + 4] - 1 || (words.length && !words[words.length - 1])) {
    fail("a chunk of a mixed stream ends too late or with a zero word");
  }
}

/**
 * Decode a stream of the coder "mixed"; the array may be transposed.
 * @type {import("./streams.js").Decode}
 */
export function decodeMixed(payload, layout) {
  const [side, data] = opened(payload);
  const alphabet = takeAlphabet(side);
  const size = alphabet.values.length;
  if (alphabet.split || size < 2) fail("the alphabet of a mixed stream is not one it can have");
  const transposed = side.take(5, 1, "the scan") === 1;
  const zero = side.take(23, size - 1, "the zero");
  const low = side.take(8, 3, "the number of low bits");
  const scale = side.take(6, SCALES - 1, "the scale");
  const prior = side.take(7, 2, "the prior");
  const pseudo = [0, 1].map(() => side.take(9, 12, "the log of a pseudo-count"));
  const symbols = ((size - 1) >> low) + 1;
  if (symbols < 2 || symbols > 512) fail(`a mixed stream has ${symbols} symbols`);
  const [rows, columns] = transposed ? [layout.columns, layout.rows] : [layout.rows, layout.columns];
  const prediction = takePrediction(side, rows, columns);
  if (alphabet.values[0] < layout.low || alphabet.values[size - 1] > layout.high) {
    fail(`a stream holds values beyond ${layout.low} … ${layout.high}`);
  }
  const height = chunkRows(columns);
  const lengths = side.chain(21, Math.ceil(rows / height));
  side.finish();
  const end = 4 * lengths.reduce((sum, length) => sum + length, 0);
  if (end > data.length) fail("the chunks of a stream are longer than its payload");
  const onPaths = !prediction && !transposed && !low;
  const paths = machine(onPaths ? layout.states : 1) ?? fail("a stream has an unknown trellis");
  const parity = Uint8Array.from(alphabet.values, (value) => value & 1);
  const middle = (prediction ? size >> 1 : zero) >> low;
  const model = makeModel(symbols, middle, scale, prior, pseudo, paths, parity);
  const words = new Uint32Array(data.slice(0, end).buffer);
  const out = new Int32Array(rows * columns);
  for (let row = 0, begin = 0, chunk = 0; row < rows; row += height, chunk++) {
    const part = out.subarray(row * columns, (row + height) * columns);
    const some = words.subarray(begin, begin + lengths[chunk]);
    decodeChunk(some, model, part.length / columns, columns, part);
    begin += lengths[chunk];
  }
  if (low) {
    const more = decodePacked(data.subarray(end), { ...layout, low: 0, high: 65535 });
    for (let i = 0; i < out.length; i++) {
      out[i] = (out[i] << low) | more[i];
      if (out[i] >= size) fail("a mixed stream holds a symbol beyond its alphabet");
    }
  } else if (end < data.length) fail("bytes follow the last chunk of a stream");
  if (prediction) addPrediction(prediction, out, rows, columns, zero, size);
  lookUp(out, alphabet.values);
  return { values: out, transposed };
}
