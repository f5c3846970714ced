/** Decoder of .birdie files in plain JavaScript: `decode`, `needs`, `toFloat32`.
 *
 *     import { decode } from "./decoder.js";
 *     const tensors = decode(await (await fetch("model.birdie")).arrayBuffer());
 *     tensors["head.weight"]; // { dtype: "bfloat16", shape: [1024, 512], data: Uint16Array }
 *
 * It does what `birdie.load` does, to the same bits: docs/format.md is the format. Every length and count is checked
 * before anything is allocated; whatever is wrong with a file is an Error of one sentence.
 */

import { bytesOf, maxBytesOf } from "./decoder/arguments.js";
import { crc32, fail } from "./decoder/bytes.js";
import { ALIAS, BLOCKS, DELTA, MEMBER, blocksOf, openContainer, product } from "./decoder/container.js";
import { DTYPES, emptyWords, toFloat32 } from "./decoder/floats.js";
import { hasViews } from "./decoder/metadata.js";
import { FOREIGN, SCHEMES } from "./decoder/schemes.js";
import { CODERS, decodeStream, streamCost } from "./decoder/streams.js";

export { toFloat32 };

/** @typedef {import("./decoder/container.js").Container} Container */
/** @typedef {import("./decoder/container.js").Entry} Entry */

/**
 * @typedef {object} Tensor
 * @property {string} dtype as torch names it
 * @property {number[]} shape
 * @property {any} data typed array in row-major order. Of dtypes that JavaScript lacks it has the words (float16,
 *     bfloat16: Uint16Array, 8-bit floats: Uint8Array, bool: 0 or 1), of complex ones real and imaginary parts in turn
 */

const MIN_LIMIT = 2 ** 30;
const PER_BYTE = 64;
const PER_TENSOR = 150_000;
const OPERATIONS_PER_BYTE = 65_536;
/** Memory that decoding takes: so many times the decoded bytes, and for tables. */
const PEAK = 6;
const ROOM = 2 ** 28;

/**
 * Return the name of a scheme, for messages.
 * @param {Container} file
 * @param {Entry} entry
 */
function nameOf(file, { kind, scheme: code }) {
  if (kind === DELTA) return "delta";
  return SCHEMES[code]?.name ?? FOREIGN[code] ?? file.metadata.schemes?.[code] ?? `of code ${code}`;
}

/**
 * Return the entries that hold the elements of all tensors.
 * @param {Container} file
 */
function coded(file) {
  const tensors = file.entries.filter((entry) => !entry.name.includes("\0"));
  const holders = [
    ...tensors.filter((entry) => entry.kind !== ALIAS && entry.kind !== MEMBER),
    ...file.groups.keys(),
  ];
  return { tensors, parts: holders.flatMap((entry) => blocksOf(file, entry)) };
}

/**
 * Return the names of what decoding a file takes, without decoding it.
 * @param {ArrayBuffer | Uint8Array} buffer
 * @returns {{ schemes: string[], coders: string[] }} sorted
 */
export function needs(buffer) {
  const file = openContainer(bytesOf(buffer));
  const { parts } = coded(file);
  const schemes = parts.map((entry) => nameOf(file, entry));
  const coders = parts.flatMap((entry) => Array.from(entry.coders, (code) => CODERS[code] ?? `of code ${code}`));
  return { schemes: [...new Set(schemes)].sort(), coders: [...new Set(coders)].sort() };
}

/**
 * @param {number[]} shape
 * @returns {[number, number]} rows, columns
 */
function matrixOf(shape) {
  return shape.length < 2 ? [1, shape[0] ?? 1] : [shape[0], product(shape.slice(1))];
}

/**
 * @param {import("./decoder/floats.js").Dtype} dtype
 * @param {number} count elements
 */
function sizeOf(dtype, count) {
  return (count * dtype.bits * dtype.words) / 8;
}

/**
 * Return the aliases whose tensors are independent of their targets: the metadata has their indices.
 * @param {Container} file
 * @param {Entry[]} tensors
 */
function copiesOf(file, tensors) {
  const aliases = tensors.filter((entry) => entry.kind === ALIAS);
  return new Set((file.metadata.copies ?? []).map((index) => aliases[index]));
}

/**
 * Return what decoding an entry takes.
 * @param {Container} file
 * @param {Entry} entry
 */
function planOf(file, entry) {
  const dtype = DTYPES[entry.dtype] ?? fail(`it has dtype code ${entry.dtype}, unknown here`);
  if (entry.kind === DELTA) fail("it is a delta, which needs its base and is not decoded here; use birdie");
  const scheme = SCHEMES[entry.scheme] ?? fail(`scheme ${nameOf(file, entry)} is not decoded here; use birdie`);
  const [rows, columns] = matrixOf(entry.shape);
  const count = rows * columns;
  const bytes = sizeOf(dtype, count);
  const layouts = scheme.layout(rows, columns, dtype, entry.params);
  if (layouts.length !== entry.coders.length) {
    fail(`scheme ${scheme.name} needs ${layouts.length} streams, not ${entry.coders.length}`);
  }
  const costs = layouts.map((layout, i) => streamCost(entry.coders[i], layout));
  const operations =
    costs.reduce((sum, cost) => sum + cost.operations, 0) + scheme.cost(rows, columns, entry.params, dtype);
  const memory = costs.reduce((sum, cost) => sum + cost.bytes, 0);
  return { entry, dtype, scheme, rows, columns, bytes, layouts, operations, memory };
}

/** @typedef {ReturnType<typeof planOf>} Plan */

/**
 * Run `work`; say in the message of an error which tensor is damaged.
 * @template T
 * @param {Entry} entry
 * @param {() => T} work
 */
function naming(entry, work) {
  try {
    return work();
  } catch (error) {
    const message = error instanceof Error ? error.message : `${error}`;
    return fail(`tensor '${entry.name.replaceAll("\0", "/")}': ${message}`);
  }
}

/**
 * Return the words of an entry.
 * @param {Container} file
 * @param {Plan} plan
 */
function decodeEntry(file, { entry, dtype, scheme, rows, columns, layouts }) {
  const starts = [entry.offset];
  for (const length of entry.lengths) starts.push(starts[starts.length - 1] + length);
  const end = starts[starts.length - 1];
  if (end > entry.offset && crc32(file.data.subarray(entry.offset, end)) !== entry.crc) fail("it fails its checksum");
  return scheme.decode(rows, columns, dtype, entry.params, (index) =>
    decodeStream(entry.coders[index], file.data.subarray(starts[index], starts[index + 1]), layouts[index]),
  );
}

/**
 * Check that decoding takes no more than is allowed.
 * @param {Container} file
 * @param {Plan[]} plans
 * @param {number} copied bytes of further copies
 * @param {number} [maxBytes]
 */
function requireLimits(file, plans, copied, maxBytes) {
  const limit = maxBytes ?? Math.max(MIN_LIMIT, PER_BYTE * file.data.length);
  const bytes = plans.reduce((sum, plan) => sum + plan.bytes, copied);
  if (bytes > limit) fail(`the file takes ${bytes} bytes to decode, more than the ${limit} allowed; raise maxBytes`);
  const most = Math.max(2 ** 31, 2 * limit) + OPERATIONS_PER_BYTE * (file.data.length - file.headerBytes);
  const operations = plans.reduce((sum, plan) => sum + PER_TENSOR + plan.operations, 0);
  if (operations > most) fail(`the file takes ${operations} operations to decode, more than the ${most} allowed`);
  const memory = bytes + plans.reduce((most, plan) => Math.max(most, plan.memory), 0);
  if (memory > PEAK * limit + ROOM) fail(`the file takes ${memory} bytes of memory to decode; raise maxBytes`);
}

/**
 * Return words as a tensor.
 * @param {Entry} entry
 * @param {import("./decoder/floats.js").Words} words
 * @returns {Tensor}
 */
function tensorOf(entry, words) {
  const { name, array } = DTYPES[entry.dtype];
  return { dtype: name, shape: entry.shape, data: new array(words.buffer) };
}

/**
 * Return the words of a tensor or group, whose blocks are joined.
 * @param {Container} file
 * @param {Entry} entry
 * @param {Map<Entry, Plan>} plans
 */
function wordsOf(file, entry, plans) {
  if (entry.kind !== BLOCKS) return naming(entry, () => decodeEntry(file, /** @type {Plan} */ (plans.get(entry))));
  const dtype = DTYPES[entry.dtype];
  const count = product(entry.shape);
  const words = emptyWords(dtype, count);
  const blocks = blocksOf(file, entry);
  let at = 0;
  for (const block of blocks) {
    const part = naming(block, () => decodeEntry(file, /** @type {Plan} */ (plans.get(block))));
    words.set(part, at);
    at += part.length;
  }
  if (blocks[0].dtype === entry.dtype) return words;
  // Real parts, then imaginary ones, in words of 32 bits or fewer.
  const pairs = emptyWords(dtype, count);
  const size = words.length / count / 2;
  for (let i = 0; i < count; i++) {
    for (let k = 0; k < size; k++) {
      pairs[2 * i * size + k] = words[i * size + k];
      pairs[(2 * i + 1) * size + k] = words[(count + i) * size + k];
    }
  }
  return pairs;
}

/**
 * Decode a file.
 * @param {ArrayBuffer | Uint8Array} buffer the bytes of a .birdie file
 * @param {{ maxBytes?: number | null } | null} [options] `maxBytes`: refuse a file that decodes to more;
 *     default the larger of 1 GiB and 64 × the file
 * @returns {Record<string, Tensor>} name → tensor; tied names share one. The object has no prototype
 */
export function decode(buffer, options) {
  const maxBytes = maxBytesOf(options);
  const file = openContainer(bytesOf(buffer));
  if (hasViews(file.metadata.tree)) fail("the file holds views of tensors, which are not decoded here; use birdie");
  const { tensors, parts } = coded(file);
  const plans = new Map(parts.map((entry) => [entry, naming(entry, () => planOf(file, entry))]));
  const copies = copiesOf(file, tensors);
  const copied = [...copies].reduce((sum, { dtype, shape }) => sum + sizeOf(DTYPES[dtype], product(shape)), 0);
  requireLimits(file, [...plans.values()], copied, maxBytes);
  /** @type {Map<Entry, Tensor>} */
  const decoded = new Map();
  for (const [group, members] of file.groups) {
    const { data } = tensorOf(group, wordsOf(file, group, plans));
    const size = data.length / members.length;
    members.forEach((member, i) => {
      const { dtype } = tensorOf(member, emptyWords(DTYPES[member.dtype], 0));
      decoded.set(member, { dtype, shape: member.shape, data: data.slice(i * size, (i + 1) * size) });
    });
  }
  for (const entry of tensors) {
    if (entry.kind !== ALIAS && entry.kind !== MEMBER)
      decoded.set(entry, tensorOf(entry, wordsOf(file, entry, plans)));
  }
  /** @type {Record<string, Tensor>} */
  const result = Object.create(null);
  for (const entry of tensors) {
    const owner = entry.kind === ALIAS ? file.entries[entry.target] : entry;
    const tensor = /** @type {Tensor} */ (decoded.get(owner));
    result[entry.name] = copies.has(entry) ? { ...tensor, data: tensor.data.slice() } : tensor;
  }
  return result;
}
