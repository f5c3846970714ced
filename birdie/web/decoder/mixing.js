/** Coder "mixed": context mixing (docs/format.md, "Coder 5" and what follows it).
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
const APM = 33;
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
 * @property {Int32Array} children at 2 · node + bit the next node, or −1 − symbol
 * @property {Int32Array} sets first weight of each node's set
 * @property {Int32Array} counters at first: a probability of 22 bits over a count of 10
 * @property {Float64Array} priors logits
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
  const { inverse, stretch } = tables();
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
  const counters = new Int32Array(CONTEXTS * parities * count);
  const priors = new Float64Array(FINE * parities * count);
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
  const sets = new Int32Array(count).map((_, node) => 8 * (node < 48 ? node : Math.min(48 + nodes[node].depth, 63)));
  const [rowCount, columnCount] = pseudo.map((log) => 2 ** log);
  return { zero, scale, rowCount, columnCount, paths, parity, nodes: count, children, sets, counters, priors };
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
 * @param {Int32Array} counters
 * @param {number} index
 * @param {number} counter its value
 * @param {number} target 2**22 − 1 for a 1, or 0
 * @param {Int32Array} adaptation
 */
function learn(counters, index, counter, target, adaptation) {
  const p = counter >>> 10;
  const n = counter & 1023;
  const step = target - p;
  const share = adaptation[n];
  // (step · share) >> 16 in 32 bits.
  const moved = (Math.imul(step >> 8, share) + (Math.imul(step & 255, share) >> 8)) >> 8;
  counters[index] = ((p + moved) << 10) | (n < 1000 ? n + 1 : n);
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
  const { zero, rowCount, columnCount, parity, nodes, children, sets, priors } = model;
  const { shift, flip, mask: pathMask } = model.paths;
  const { squash, stretch, log2, power, adaptation } = tables();
  const stride = model.paths.plain ? nodes : 2 * nodes;
  const counters = model.counters.slice();
  const weights = new Float64Array(16 * SETS).map((_, i) => FIRST_WEIGHTS[i & 7]);
  const apm = new Int32Array(SETS * APM).map((_, i) => {
    const logit = clip(128 * ((i % APM) - 16), -LIMIT, LIMIT);
    return (squash[logit + 2048] << 16) | 6;
  });
  const mean = power[model.scale] + 1;
  const base = model.scale - FINE;
  const cap = 2 * (Math.floor(mean / 16) + 2);
  const energy = Math.floor((mean * mean * 25) / 1024) + 1;
  const nearest = Math.floor(mean / 4) + 1;
  // Columns of a single row never learn: they share one entry.
  const entries = rows > 1 ? columns : 1;
  const mask = rows > 1 ? -1 : 0;
  const slow = new Float64Array(entries).fill(energy);
  const fast = new Float64Array(entries).fill(energy);
  const firstScale = ((logOf(energy, log2) + 86) >> 1) - base;
  const slowScale = new Int32Array(entries).fill(firstScale);
  const fastScale = new Int32Array(entries).fill(firstScale);
  const magnitudes = new Int32Array(columns);
  const states = new Uint8Array(columns);
  // The range coder: halves of 64 bits.
  let codeHigh = words.length > 0 ? words[0] | 0 : 0;
  let codeLow = words.length > 1 ? words[1] | 0 : 0;
  let widthHigh = -1;
  let widthLow = -1;
  let position = 2;
  let rowLevel = energy;
  let columnLevel = energy;
  for (let row = 0, at = 0; row < rows; row++) {
    let rowSum = rowCount * rowLevel;
    let expectedSum = rowCount * columnLevel;
    const rowScale = ((logOf(rowLevel, log2) + 86) >> 1) - base;
    const rate = Math.max(8, 24 - Math.floor((row * columns) / 4000));
    const band = 128 + Math.floor((8 * row) / rows);
    let left = 0;
    let left2 = 0;
    for (let column = 0; column < columns; column++, at++) {
      const state = states[column & pathMask];
      const odd = state & 1;
      const first = odd ? nodes : 0;
      const entry = column & mask;
      const own = (logOf(rowSum, log2) - logOf(expectedSum, log2)) >> 1;
      const product = slowScale[entry] + own;
      const quick = fastScale[entry] + own;
      const near = logOf(((13 * (2 * left + left2 + 2 * magnitudes[column])) >> 1) + nearest, log2) - base;
      const coarse = clip((product + 4) >> 3, 0, 15);
      const s0 = coarse * stride + first;
      const s1 = (16 + clip((own + rowScale + 4) >> 3, 0, 15)) * stride + first;
      const s2 = (32 + clip((quick + 4) >> 3, 0, 15)) * stride + first;
      const s3 = (48 + clip((3 * product + near + 16) >> 5, 0, 15)) * stride + first;
      const s4 = (64 + clip((slowScale[entry] + 1) >> 1, 0, 63)) * stride + first;
      const s5 = (band + 8 * Math.floor((8 * column) / columns)) * stride + first;
      const s6 = clip((product + 1) >> 1, 0, 63) * stride + first;
      const s7 = clip((quick + 1) >> 1, 0, 63) * stride + first;
      const b = 8 * (SETS + coarse);
      let node = 0;
      do {
        const c0 = counters[s0 + node];
        const c1 = counters[s1 + node];
        const c2 = counters[s2 + node];
        const c3 = counters[s3 + node];
        const c4 = counters[s4 + node];
        const c5 = counters[s5 + node];
        const l0 = stretch[c0 >>> 20];
        const l1 = stretch[c1 >>> 20];
        const l2 = stretch[c2 >>> 20];
        const l3 = stretch[c3 >>> 20];
        const l4 = stretch[c4 >>> 20];
        const l5 = stretch[c5 >>> 20];
        const l6 = priors[s6 + node];
        const l7 = priors[s7 + node];
        const a = sets[node];
        const byNode = Math.floor(
          (weights[a] * l0 + weights[a + 1] * l1 + (weights[a + 2] * l2 + weights[a + 3] * l3) +
            (weights[a + 4] * l4 + weights[a + 5] * l5 + (weights[a + 6] * l6 + weights[a + 7] * l7))) * UNIT,
        );
        const byScale = Math.floor(
          (weights[b] * l0 + weights[b + 1] * l1 + (weights[b + 2] * l2 + weights[b + 3] * l3) +
            (weights[b + 4] * l4 + weights[b + 5] * l5 + (weights[b + 6] * l6 + weights[b + 7] * l7))) * UNIT,
        );
        const y1 = clip(byNode, -LIMIT, LIMIT) + 2048;
        const y2 = clip(byScale, -LIMIT, LIMIT) + 2048;
        const middle = (y1 + y2) >> 1;
        const part = middle & 127;
        const entries33 = (a >> 3) * APM;
        const bucket = entries33 + (middle >> 7);
        const refined = (Math.imul(apm[bucket] >>> 16, 128 - part) + Math.imul(apm[bucket + 1] >>> 16, part)) >> 7;
        const odds = clip((3 * squash[middle] + refined) >> 2, 8, 65528);
        // bound = (width >> 16) · odds, in 16-bit digits.
        const p0 = Math.imul(widthLow >>> 16, odds);
        const p1 = Math.imul(widthHigh & 65535, odds);
        const sum = (p0 >>> 16) + (p1 & 65535);
        const boundLow = (sum << 16) | (p0 & 65535);
        const boundHigh = (Math.imul(widthHigh >>> 16, odds) + (p1 >>> 16) + (sum >>> 16)) | 0;
        const bit =
          codeHigh >>> 0 < boundHigh >>> 0 || (codeHigh === boundHigh && codeLow >>> 0 < boundLow >>> 0) ? 1 : 0;
        if (bit) {
          widthHigh = boundHigh;
          widthLow = boundLow;
        } else {
          codeHigh = (codeHigh - boundHigh - (codeLow >>> 0 < boundLow >>> 0 ? 1 : 0)) | 0;
          codeLow = (codeLow - boundLow) | 0;
          widthHigh = (widthHigh - boundHigh - (widthLow >>> 0 < boundLow >>> 0 ? 1 : 0)) | 0;
          widthLow = (widthLow - boundLow) | 0;
        }
        if (widthHigh === 0) {
          widthHigh = widthLow;
          widthLow = 0;
          codeHigh = codeLow;
          codeLow = position < words.length ? words[position] | 0 : 0;
          position++;
        }
        const target = bit << 16;
        const e1 = ((target - squash[y1]) * rate) >> 4;
        weights[a] += Math.floor((l0 * e1 + 16384) / 32768);
        weights[a + 1] += Math.floor((l1 * e1 + 16384) / 32768);
        weights[a + 2] += Math.floor((l2 * e1 + 16384) / 32768);
        weights[a + 3] += Math.floor((l3 * e1 + 16384) / 32768);
        weights[a + 4] += Math.floor((l4 * e1 + 16384) / 32768);
        weights[a + 5] += Math.floor((l5 * e1 + 16384) / 32768);
        weights[a + 6] += Math.floor((l6 * e1 + 16384) / 32768);
        weights[a + 7] += Math.floor((l7 * e1 + 16384) / 32768);
        const e2 = ((target - squash[y2]) * rate) >> 4;
        weights[b] += Math.floor((l0 * e2 + 16384) / 32768);
        weights[b + 1] += Math.floor((l1 * e2 + 16384) / 32768);
        weights[b + 2] += Math.floor((l2 * e2 + 16384) / 32768);
        weights[b + 3] += Math.floor((l3 * e2 + 16384) / 32768);
        weights[b + 4] += Math.floor((l4 * e2 + 16384) / 32768);
        weights[b + 5] += Math.floor((l5 * e2 + 16384) / 32768);
        weights[b + 6] += Math.floor((l6 * e2 + 16384) / 32768);
        weights[b + 7] += Math.floor((l7 * e2 + 16384) / 32768);
        const at33 = entries33 + ((middle + 64) >> 7);
        const old = apm[at33];
        const seen = old & 65535;
        const moved = (old >>> 16) + (Math.imul((bit ? 65535 : 0) - (old >>> 16), adaptation[seen]) >> 16);
        apm[at33] = (moved << 16) | (seen < 250 ? seen + 1 : seen);
        const top = bit ? 4194303 : 0;
        learn(counters, s0 + node, c0, top, adaptation);
        learn(counters, s1 + node, c1, top, adaptation);
        learn(counters, s2 + node, c2, top, adaptation);
        learn(counters, s3 + node, c3, top, adaptation);
        learn(counters, s4 + node, c4, top, adaptation);
        learn(counters, s5 + node, c5, top, adaptation);
        node = children[2 * node + bit];
      } while (node >= 0);
      const symbol = -1 - node;
      out[at] = symbol;
      left2 = left;
      left = Math.abs(2 * (symbol - zero) + odd);
      magnitudes[column] = left;
      states[column & pathMask] = (state >> 1) ^ (-odd & shift) ^ (-parity[symbol] & flip);
      const held = left < cap ? left : cap;
      rowSum += 16 * held * held;
      expectedSum += slow[entry];
    }
    if (row === rows - 1) break;
    if (!(rowSum < 2 ** 52 && expectedSum < 2 ** 52)) fail("the scales of a mixed stream are beyond 52 bits");
    const isSmall = expectedSum < EXACT && rowSum < EXACT;
    const normalize = isSmall
      ? Math.floor((65536 * (expectedSum + 64)) / (rowSum + 64))
      : Number((BigInt(expectedSum + 64) * 65536n) / BigInt(rowSum + 64));
    rowLevel = row
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
      slowScale[column] = ((logOf(slow[column], log2) + 86) >> 1) - base;
      fastScale[column] = ((logOf(fast[column], log2) + 86) >> 1) - base;
    }
    columnLevel = Math.floor(total / columns) + 1;
  }
  if (words.length > position - 1 || (words.length && !words[words.length - 1])) {
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
