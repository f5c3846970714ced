/** Schemes: from integers to tensors (docs/format.md, "Schemes"). */

import { chunkRows, machine } from "./alphabet.js";
import { fail } from "./bytes.js";
import { BFLOAT16, FLOAT16, FLOAT32, FLOAT64, emptyWords, isReal, stepsOf, storeFloats, widen } from "./floats.js";
import { decodeLossless, joinPlanes, losslessCost, losslessLayout, planeLayout } from "./lossless.js";
import { streamLayout } from "./streams.js";

/** @typedef {import("./floats.js").Dtype} Dtype */
/** @typedef {import("./floats.js").Words} Words */
/** @typedef {import("./streams.js").Layout} Layout */
/** @typedef {import("./streams.js").Stream} Stream */

/**
 * @callback LayoutOf
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {number[]} params
 * @returns {Layout[]}
 */

/**
 * @callback DecodeOf
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {number[]} params
 * @param {(index: number) => Stream} read decodes a stream
 * @returns {Words}
 */

/**
 * @typedef {object} Scheme
 * @property {string} name
 * @property {LayoutOf} layout
 * @property {DecodeOf} decode
 * @property {(rows: number, columns: number, params: number[], dtype: Dtype) => number} cost operations, about
 */

/** Elements computed at a time. */
const BLOCK = 1 << 16;

/**
 * @typedef {object} Block rows and columns that are computed at a time
 * @property {number} row first one
 * @property {number} rows
 * @property {number} column first one
 * @property {number} end column after the last
 */

/**
 * Return the words of a tensor whose numbers are computed block by block, from top to bottom, and rounded once.
 * @template {Float32Array | Float64Array} Numbers
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {new (length: number) => Numbers} kind in which numbers are computed
 * @param {(block: Block, out: Numbers) => void} fill
 * @param {number} [size] columns that are not cut
 */
function ofBlocks(rows, columns, dtype, kind, fill, size = BLOCK) {
  const height = Math.max(1, Math.floor(BLOCK / columns));
  const out = emptyWords(dtype, rows * columns);
  for (let row = 0; row < rows; row += height) {
    const count = Math.min(height, rows - row);
    for (let column = 0; column < columns; column += size) {
      const end = Math.min(column + size, columns);
      const numbers = new kind(count * (end - column));
      fill({ row, rows: count, column, end }, numbers);
      out.set(
        storeFloats(numbers, dtype),
        ((row * columns + column) * dtype.bits) / (dtype.bits === 64 ? 32 : dtype.bits),
      );
    }
  }
  return out;
}

/**
 * Check a tensor that holds quantized numbers.
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 */
function requireReal(rows, columns, dtype) {
  if (!isReal(dtype) || !rows || !columns) {
    fail(`a tensor of ${dtype.name} and ${rows} × ${columns} cannot be quantized`);
  }
}

/**
 * @param {number} rows
 * @param {number} columns
 * @param {Dtype} dtype
 * @param {number} size of a group of columns
 * @param {number} bits of symbols
 */
function groupedLayout(rows, columns, dtype, size, bits) {
  requireReal(rows, columns, dtype);
  if (!(size >= 1 && size <= columns)) fail(`a group of ${size} columns does not fit rows of ${columns}`);
  return [streamLayout(rows, columns, bits), streamLayout(rows, Math.ceil(columns / size), -16)];
}

/**
 * Return a stream as an array; a constant is repeated.
 * @param {Stream} stream
 * @param {number} count
 */
function expanded({ values, step }, count) {
  return step ? values : new Int32Array(count).fill(values[0]);
}

/** @type {Scheme["cost"]} */
function gridCost(rows, columns, [size = columns]) {
  return rows * (2 * columns + 20 * Math.ceil(columns / size));
}

/** Symbol · step of its group, in float32. @type {DecodeOf} */
function decodeGrid(rows, columns, dtype, params, read) {
  const symbols = read(0);
  const size = params.length ? params[0] : columns;
  const groups = Math.ceil(columns / size);
  const steps = stepsOf(expanded(read(1), rows * groups));
  const { values, step } = symbols;
  return ofBlocks(rows, columns, dtype, Float32Array, (block, out) => {
    for (let row = block.row, i = 0; row < block.row + block.rows; row++) {
      let at = (row * columns + block.column) * step;
      for (let c = block.column; c < block.end;) {
        const group = Math.floor(c / size);
        const scale = steps[row * groups + group];
        const end = Math.min((group + 1) * size, block.end);
        for (; c < end; c++, at += step) out[i++] = Math.fround(values[at]) * scale;
      }
    }
  });
}

/** @type {DecodeOf} */
function decodeTernary(rows, columns, dtype, params, read) {
  return decodeGrid(rows, columns, dtype, params, (index) => {
    const stream = read(index);
    if (!index && stream.values.some((symbol) => symbol < -1 || symbol > 1)) fail("a ternary symbol is not −1, 0 or 1");
    return stream;
  });
}

/** Level of the symbol · step. @type {DecodeOf} */
function decodeCodebook(rows, columns, dtype, [size, perRow], read) {
  const symbols = read(0);
  const levels = expanded(read(1), size);
  const steps = stepsOf(expanded(read(2), perRow ? rows : 1));
  levels.forEach((level, i) => {
    if (Math.abs(level) > 2 ** 23 || (i && level <= levels[i - 1])) {
      fail("the levels of a codebook do not rise within 24 bits");
    }
  });
  if (symbols.values.some((symbol) => symbol >= size)) fail(`a symbol is beyond a codebook of ${size} levels`);
  return ofBlocks(rows, columns, dtype, Float64Array, (block, out) => {
    let at = (block.row * columns + block.column) * symbols.step;
    for (let row = block.row, i = 0; row < block.row + block.rows; row++) {
      const step = steps[perRow ? row : 0];
      for (let c = block.column; c < block.end; c++, at += symbols.step) out[i++] = levels[symbols.values[at]] * step;
    }
  });
}

const RESOLUTIONS = [1, 2, 4, 8, 16];

/** @type {LayoutOf} */
function trellisLayout(rows, columns, dtype, params) {
  requireReal(rows, columns, dtype);
  const [states, down, along, base, finer] = params;
  const isKnown = machine(states) && RESOLUTIONS.includes(down) && (!along || RESOLUTIONS.includes(along));
  if (params.length !== 5 || !isKnown || base < -2016 || base > 2047 || finer < 0 || finer >= rows) {
    fail(`scheme trellis has parameters ${params} for ${rows} rows`);
  }
  const layouts = [streamLayout(rows, columns, -32, states), streamLayout(rows, 1, -16)];
  return along ? [...layouts, streamLayout(columns, 1, -16)] : layouts;
}

/** (2m + odd) · half the row's step · the column's step, in float32. @type {DecodeOf} */
function decodeTrellis(rows, columns, dtype, params, read) {
  const [states, down, along, base, finer] = params;
  const { values: numbers, step } = read(0);
  const byRow = stepsOf(expanded(read(1), rows).map((k, row) => (16 / down) * k + base + (row < finer ? 1 : 0)));
  const byColumn = along
    ? stepsOf(expanded(read(2), columns).map((k) => (16 / along) * k))
    : new Float32Array(columns).fill(1);
  const { shift, flip, mask } = machine(states) ?? fail("a stream has an unknown trellis");
  const state = new Int32Array(columns);
  const restart = chunkRows(columns);
  let half = 0;
  return ofBlocks(rows, columns, dtype, Float32Array, (block, out) => {
    for (let row = block.row, i = 0; row < block.row + block.rows; row++) {
      const first = row * columns * step;
      if (!block.column) {
        if (row % restart === 0) state.fill(0);
        half = Math.fround(byRow[row] * 0.5);
        let zeros = 0;
        while (columns >= 16 && zeros < columns && !numbers[first + zeros * step]) zeros++;
        if (zeros === columns) half = 0;
      }
      for (let c = block.column; c < block.end; c++) {
        const m = numbers[first + c * step];
        const path = c & mask;
        const s = state[path];
        out[i++] = Math.fround(Math.fround(2 * m + (s & 1)) * half) * byColumn[c];
        state[path] = (s >> 1) ^ (-(s & 1) & shift) ^ (-(m & 1) & flip);
      }
    }
  });
}

/** @type {DecodeOf} */
function decodeCast(rows, columns, dtype, params, read) {
  const from = params[0] ? BFLOAT16 : FLOAT16;
  const words = joinPlanes(from, rows * columns, read);
  const bits = widen(/** @type {Uint16Array} */ (words), from);
  if (dtype === FLOAT32) return bits;
  return new Uint32Array(new Float64Array(new Float32Array(bits.buffer)).buffer);
}

/**
 * Return the inner tensor that parameters begin with, and the parameters after it.
 * @param {number} rows
 * @param {number} columns
 * @param {number[]} params
 */
function innerOf(rows, columns, params) {
  const [code, count] = params;
  const own = params.slice(2, 2 + Math.max(count, 0));
  if (![2, 5, 6].includes(code) || own.length !== count) fail(`an inner tensor has scheme code ${code}`);
  const scheme = /** @type {Scheme} */ (SCHEMES[code]);
  return { scheme, own, layouts: scheme.layout(rows, columns, FLOAT32, own), rest: params.slice(2 + count) };
}

/**
 * Return the numbers of an inner tensor.
 * @param {ReturnType<typeof innerOf>} inner
 * @param {number} rows
 * @param {number} columns
 * @param {(index: number) => Stream} read
 */
function decodeInner({ scheme, own }, rows, columns, read) {
  return new Float32Array(scheme.decode(rows, columns, FLOAT32, own, read).buffer);
}

/**
 * Return the operations that decoding inner tensors takes.
 * @param {number} rows
 * @param {number} columns
 * @param {number[]} params
 */
function innerCost(rows, columns, params) {
  let total = 0;
  while (params.length) {
    const { scheme, own, rest } = innerOf(rows, columns, params);
    total += scheme.cost(rows, columns, own, FLOAT32);
    params = rest;
  }
  return total;
}

/** @type {LayoutOf} */
function lowRankLayout(rows, columns, dtype, params) {
  requireReal(rows, columns, dtype);
  const rank = params[0];
  const inner = innerOf(rows, columns, params.slice(1));
  if (inner.rest.length || !(rank >= 1 && rank <= Math.min(rows, columns))) {
    fail(`scheme lowrank has parameters ${params}`);
  }
  return [...inner.layouts, streamLayout(rows, rank, -8), streamLayout(rank, columns, -8), streamLayout(rank, 1, -16)];
}

/** Base plus the sum of products of columns and rows. @type {DecodeOf} */
function decodeLowRank(rows, columns, dtype, params, read) {
  const rank = params[0];
  const inner = innerOf(rows, columns, params.slice(1));
  const base = decodeInner(inner, rows, columns, read);
  const count = inner.layouts.length;
  const left = expanded(read(count), rows * rank);
  const right = new Float64Array(expanded(read(count + 1), rank * columns));
  const steps = stepsOf(expanded(read(count + 2), rank));
  for (let k = 0, at = 0; k < rank; k++) {
    for (let c = 0; c < columns; c++, at++) right[at] *= steps[k];
  }
  return ofBlocks(rows, columns, dtype, Float64Array, ({ row, rows: height, column, end }, out) => {
    const width = end - column;
    for (let r = 0; r < height; r++) {
      const line = out.subarray(r * width, (r + 1) * width);
      line.set(base.subarray((row + r) * columns + column, (row + r) * columns + end));
      for (let k = 0; k < rank; k++) {
        const factor = left[(row + r) * rank + k];
        const start = k * columns + column;
        for (let c = 0; c < width; c++) line[c] += factor * right[start + c];
      }
    }
  });
}

/** @type {LayoutOf} */
function rotationLayout(rows, columns, dtype, params) {
  requireReal(rows, columns, dtype);
  const inner = innerOf(rows, columns, params.slice(1));
  if (inner.rest.length || !(params[0] >= 0 && params[0] < 65536)) fail(`scheme rotation has parameters ${params}`);
  return inner.layouts;
}

/** Inner tensor, rows rotated back. @type {DecodeOf} */
function decodeRotation(rows, columns, dtype, params, read) {
  const matrix = decodeInner(innerOf(rows, columns, params.slice(1)), rows, columns, read);
  const size = 2 ** (31 - Math.clz32(columns));
  const signs = [2 * params[0], 2 * params[0] + 1].map((seed) => signsOf(size, seed));
  /** @param {Block} block @param {Float64Array} out */
  const fill = ({ row, rows: height }, out) => {
    out.set(matrix.subarray(row * columns, (row + height) * columns));
    for (let r = 0; r < height; r++) {
      const line = out.subarray(r * columns, (r + 1) * columns);
      if (size < columns) turnBack(line.subarray(columns - size), signs[1]);
      turnBack(line.subarray(0, size), signs[0]);
    }
  };
  return ofBlocks(rows, columns, dtype, Float64Array, fill, columns);
}

/**
 * Return factors ± 1 of a seed, scaled so that a transform of as many elements keeps lengths.
 * @param {number} size a power of two
 * @param {number} seed
 */
function signsOf(size, seed) {
  const doublings = 31 - Math.clz32(size);
  const factor = 2 ** -(doublings >> 1) * (doublings % 2 ? 0.7071067811865476 : 1);
  return new Float64Array(size).map((_, i) => {
    let z = Math.imul((i + seed * 2 ** 24 + 1) | 0, 0x9e3779b1);
    for (const f of [0x85ebca6b, 0xc2b2ae35]) z = Math.imul(z ^ (z >>> 15), f);
    return z < 0 ? -factor : factor;
  });
}

/**
 * Undo signs and Hadamard transform.
 * @param {Float64Array} line
 * @param {Float64Array} signs
 */
function turnBack(line, signs) {
  for (let h = 1; h < line.length; h *= 2) {
    for (let start = 0; start < line.length; start += 2 * h) {
      for (let i = start; i < start + h; i++) {
        const a = line[i];
        const b = line[i + h];
        line[i] = a + b;
        line[i + h] = a - b;
      }
    }
  }
  for (let i = 0; i < line.length; i++) line[i] *= signs[i];
}

/** By code; null for an entry that is no coded tensor. @type {Record<number, Scheme>} */
export const SCHEMES = {
  1: { name: "lossless", layout: losslessLayout, decode: decodeLossless, cost: losslessCost },
  2: {
    name: "grid",
    layout(rows, columns, dtype, params) {
      if (params.length > 1) fail(`scheme grid has ${params.length} parameters`);
      return groupedLayout(rows, columns, dtype, params.length ? params[0] : columns, -32);
    },
    decode: decodeGrid,
    cost: gridCost,
  },
  3: {
    name: "cast",
    layout(rows, columns, dtype, params) {
      const isKnown = params.length === 1 && (params[0] === 0 || params[0] === 1);
      if (!isKnown || (dtype !== FLOAT32 && dtype !== FLOAT64)) {
        fail(`scheme cast has parameters ${params} for ${dtype.name}`);
      }
      return planeLayout(rows, columns, FLOAT16);
    },
    decode: decodeCast,
    cost: (rows, columns) => 2 * rows * columns,
  },
  4: {
    name: "trellis",
    layout: trellisLayout,
    decode: decodeTrellis,
    cost: (rows, columns) => rows * (16 * columns + 24),
  },
  5: {
    name: "ternary",
    layout(rows, columns, dtype, params) {
      if (params.length !== 1) fail(`scheme ternary has ${params.length} parameters`);
      return groupedLayout(rows, columns, dtype, params[0], -8);
    },
    decode: decodeTernary,
    cost: gridCost,
  },
  6: {
    name: "codebook",
    layout(rows, columns, dtype, params) {
      requireReal(rows, columns, dtype);
      const [size, perRow] = params;
      if (params.length !== 2 || !(size >= 1 && size <= 256) || (perRow !== 0 && perRow !== 1)) {
        fail(`scheme codebook has parameters ${params}`);
      }
      return [streamLayout(rows, columns, 8), streamLayout(1, size, -32), streamLayout(perRow ? rows : 1, 1, -16)];
    },
    decode: decodeCodebook,
    cost: (rows, columns, [, perRow]) => rows * (24 * columns + 100 * perRow),
  },
  7: {
    name: "rotation",
    layout: rotationLayout,
    decode: decodeRotation,
    cost: (rows, columns, params) =>
      rows * columns * (16 + 8 * (32 - Math.clz32(columns))) + innerCost(rows, columns, params.slice(1)),
  },
  8: {
    name: "lowrank",
    layout: lowRankLayout,
    decode: decodeLowRank,
    cost: (rows, columns, params) => rows * columns * (28 + 6 * params[0]) + innerCost(rows, columns, params.slice(1)),
  },
};

/** Names of schemes that are not decoded here. @type {Record<number, string>} */
export const FOREIGN = { 9: "spectral", 10: "tucker" };
