/** The container: header, entries, metadata (docs/format.md, "File"). Every count is checked before anything is kept. */

import { Cursor, crc32, fail, inflate } from "./bytes.js";
import { DTYPES } from "./floats.js";
import { parseMetadata } from "./metadata.js";

const MAGIC = [137, 66, 82, 68, 13, 10, 26, 10];
const PREFIX = 22;
const MAX_HEADER = 2 ** 26;
const MAX_ELEMENTS = 2 ** 48;
const MAX_FIELDS = 2 ** 20;
const MAX_NAMES = 2 ** 24;

const VERSION = 0x100;
const MAX_SCHEME = 2 ** 16 - 1;

/** Kinds of entries. */
export const TENSOR = 0;
export const ALIAS = 1;
export const BLOCKS = 2;
export const MEMBER = 3;
export const DELTA = 4;
const FILES = 5;

/**
 * @typedef {object} Entry
 * @property {string} name
 * @property {number} kind
 * @property {number} scheme of a tensor; 0 for other kinds
 * @property {number} dtype
 * @property {number[]} shape
 * @property {number} target index of the entry that an alias or member refers to; -1 for other kinds
 * @property {number[]} params
 * @property {Uint8Array} coders of its streams
 * @property {number[]} lengths of their payloads
 * @property {number} offset of the first one
 * @property {number} crc of all
 */

/**
 * @typedef {object} Container
 * @property {Uint8Array} data
 * @property {number} headerBytes
 * @property {import("./metadata.js").Metadata} metadata
 * @property {Entry[]} entries
 * @property {Map<string, Entry>} byName
 * @property {Map<Entry, Entry[]>} groups members of entries that several tensors share
 */

/** @param {number[]} numbers */
export function product(numbers) {
  return numbers.reduce((total, number) => total * number, 1);
}

/**
 * Open a file and check its header.
 * @param {Uint8Array} data
 * @returns {Container}
 */
export function openContainer(data) {
  if (MAGIC.some((byte, i) => data[i] !== byte)) {
    const isText = MAGIC.slice(1, 4).every((byte, i) => data[i + 1] === byte);
    fail(
      isText ? "the file was changed by a text-mode transfer; copy it again as binary" : "this is not a .birdie file",
    );
  }
  if (data.length < PREFIX) fail(`the file is cut inside its first ${PREFIX} bytes`);
  const view = new DataView(data.buffer, data.byteOffset);
  const version = view.getUint16(8, true);
  const packedLength = view.getUint32(10, true);
  const length = view.getUint32(14, true);
  const longest = Math.min(MAX_HEADER, Math.max(2 ** 20, 64 * data.length));
  if (version !== VERSION) fail(`the file has format version ${version >> 8}.${version & 255}, 1.0 is read here`);
  if (length > longest || packedLength > length) fail("the file declares an impossible header");
  const headerBytes = PREFIX + packedLength;
  if (headerBytes > data.length) fail("the file is cut inside its header");
  const packed = data.subarray(PREFIX, headerBytes);
  const checked = new Uint8Array(10 + packedLength);
  checked.set(data.subarray(8, 18));
  checked.set(packed, 10);
  if (crc32(checked) !== view.getUint32(18, true)) fail("the header of the file fails its checksum");
  const header = readHeader(packedLength < length ? inflate(packed, length) : packed, headerBytes);
  if (header.end !== data.length) {
    fail(`the file has ${data.length} bytes, its header describes ${header.end}; it is cut or has bytes added`);
  }
  const byName = new Map(header.entries.map((entry) => [entry.name, entry]));
  const aliases = header.entries.filter((entry) => entry.kind === ALIAS && !entry.name.includes("\0"));
  const container = { data, headerBytes, byName, ...header, metadata: parseMetadata(header.metadata, aliases.length) };
  for (const entry of header.entries) {
    if (entry.kind === BLOCKS && (!entry.name.includes("\0") || header.groups.has(entry)))
      requireBlocks(container, entry);
  }
  return container;
}

/**
 * @param {Uint8Array} header
 * @param {number} offset of the first payload
 */
function readHeader(header, offset) {
  const cursor = new Cursor(header, "the header of the file");
  const metadata = cursor.take(cursor.count(MAX_HEADER, "length of the metadata"));
  const count = cursor.count(2 ** 17, "number of entries");
  const names = readNames(cursor, count);
  const schemes = names.map(() => cursor.varint(MAX_SCHEME, "number of a scheme"));
  const codes = names.map(() => cursor.varint(2 ** 22, "kind of an entry"));
  const kinds = codes.map((code) => code >> 6);
  const unknown = kinds.findIndex((kind) => kind > FILES);
  if (unknown >= 0) fail(`'${names[unknown]}' is an entry of kind ${kinds[unknown]}, unknown here; use a newer birdie`);
  const odd = kinds.findIndex((kind, i) => kind !== TENSOR && schemes[i]);
  if (odd >= 0) cursor.fail(`'${names[odd]}' is no coded tensor and has a scheme`);
  const targets = kinds.map((kind) =>
    kind === ALIAS || kind === MEMBER ? cursor.varint(count - 1, "index of an entry") : -1,
  );
  let left = MAX_FIELDS;
  /**
   * @param {boolean[]} has whether an entry has such numbers
   * @param {number} most
   * @param {number} limit
   * @param {string} what
   */
  const column = (has, most, limit, what) =>
    has.map((hasAny) => {
      if (!hasAny) return [];
      const size = cursor.count(most, `number of times a ${what}`);
      left -= size;
      if (left < 0) cursor.fail("there are more dimensions, parameters and streams than any model has");
      return Array.from({ length: size }, () => cursor.varint(limit, what));
    });
  const shapes = column(Array(count).fill(true), 16, MAX_ELEMENTS, "size of a dimension");
  if (shapes.some((shape) => product(shape.filter((size) => size)) > MAX_ELEMENTS)) {
    cursor.fail(`a shape has more than ${MAX_ELEMENTS} elements`);
  }
  const isCoded = kinds.map((kind) => kind === TENSOR || kind === DELTA || kind === FILES);
  const zigzag = column(isCoded, 4096, 2 ** 64, "parameter");
  const coders = isCoded.map((coded) => {
    if (!coded) return new Uint8Array(0);
    const size = cursor.count(64, "number of streams");
    left -= size;
    if (left < 0) cursor.fail("there are more dimensions, parameters and streams than any model has");
    return cursor.take(size);
  });
  const lengths = coders.map((some) => Array.from(some, () => cursor.varint(2 ** 63, "length of a stream")));
  let end = offset;
  const entries = names.map((name, i) => {
    const length = lengths[i].reduce((sum, one) => sum + one, 0);
    const crc = length ? cursor.take(4).reduceRight((sum, byte) => sum * 256 + byte, 0) : 0;
    const params = zigzag[i].map((v) => (v % 2 ? -(v + 1) / 2 : v / 2));
    end += length;
    const start = end - length;
    const fixed = { name, kind: kinds[i], scheme: schemes[i], dtype: codes[i] & 63, shape: shapes[i], params };
    return { ...fixed, target: targets[i], coders: coders[i], lengths: lengths[i], offset: start, crc };
  });
  if (cursor.position !== header.length) cursor.fail("bytes follow the last field");
  return { metadata, entries, groups: linked(cursor, entries), end };
}

/**
 * @param {Cursor} cursor
 * @param {number} count
 */
function readNames(cursor, count) {
  const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  const names = [];
  let previous = new Uint8Array(0);
  let total = 0;
  for (let i = 0; i < count; i++) {
    const shared = cursor.varint(previous.length, "length of a shared prefix");
    const more = cursor.take(cursor.count(4096 - shared, "length of a name"));
    const name = new Uint8Array(shared + more.length);
    name.set(previous.subarray(0, shared));
    name.set(more, shared);
    total += name.length;
    if (total > MAX_NAMES) cursor.fail(`all names together have more than ${MAX_NAMES} bytes`);
    let same = 0;
    while (same < name.length && name[same] === previous[same]) same++;
    const rises = same < name.length && (same === previous.length || name[same] > previous[same]);
    if (i && !rises) cursor.fail("names are not in strictly rising order");
    try {
      names.push(text.decode(name));
    } catch {
      cursor.fail("a name is not UTF-8");
    }
    previous = name;
  }
  return names;
}

/**
 * Check aliases and members; return the groups.
 * @param {Cursor} cursor
 * @param {Entry[]} entries
 */
function linked(cursor, entries) {
  /** @type {Map<Entry, Entry[]>} */
  const groups = new Map();
  for (const entry of entries) {
    if (entry.kind !== ALIAS && entry.kind !== MEMBER) continue;
    const target = entries[entry.target];
    if (entry.kind === MEMBER) {
      const members = groups.get(target) ?? [];
      members.push(entry);
      groups.set(target, members);
    } else if (target.kind === ALIAS || target.name.includes("\0") || !isAlike(entry, target)) {
      cursor.fail(`alias '${entry.name}' points to no stored tensor of its shape and dtype`);
    }
  }
  for (const [group, members] of groups) {
    if (
      [ALIAS, FILES, MEMBER].includes(group.kind) ||
      group.name.lastIndexOf("\0") !== 0 ||
      members.some((member) => member.name.includes("\0") || !isAlike(member, members[0])) ||
      members[0].dtype !== group.dtype ||
      members.length * product(members[0].shape) !== product(group.shape)
    ) {
      cursor.fail(`the tensors of group '${group.name.slice(1)}' do not make it up`);
    }
  }
  return groups;
}

/**
 * @param {Entry} one
 * @param {Entry} other
 */
function isAlike(one, other) {
  return one.dtype === other.dtype && `${one.shape}` === `${other.shape}`;
}

/**
 * Return the entries that hold the blocks of one, in order, or the entry itself.
 * @param {Container} container
 * @param {Entry} entry
 */
export function blocksOf(container, entry) {
  if (entry.kind !== BLOCKS) return [entry];
  const blocks = [];
  for (let block; (block = container.byName.get(`${entry.name}\0${blocks.length}`));) blocks.push(block);
  return blocks;
}

/**
 * Check that the blocks of a tensor make it up.
 * @param {Container} container
 * @param {Entry} entry
 */
function requireBlocks(container, entry) {
  const blocks = blocksOf(container, entry);
  const [first] = blocks;
  const last = first ? first.shape.slice(1) : [];
  let shape = entry.shape;
  if (first && first.dtype !== entry.dtype) shape = [2, ...shape.slice(0, 1), product(shape.slice(1))];
  const cut = shape.length - last.length;
  // Blocks of a vector are rows and what is left over; others are rows of the tensor.
  const ofRows =
    cut >= 1 &&
    `${shape.slice(cut)}` === `${last}` &&
    blocks.every((block) => block.shape.length > 0 && `${block.shape.slice(1)}` === `${last}`);
  const isSound =
    first &&
    (ofRows || entry.shape.length === 1) &&
    blocks.every(
      (block) =>
        product(block.shape) > 0 &&
        block.dtype === first.dtype &&
        (block.kind === TENSOR || block.kind === DELTA),
    ) &&
    blocks.reduce((sum, block) => sum + product(block.shape), 0) === product(shape) &&
    (first.dtype === entry.dtype || isPart(first.dtype, entry.dtype));
  if (!isSound) fail(`the blocks of tensor '${entry.name}' do not make it up`);
}

/**
 * Return whether a dtype is that of the real parts of complex numbers of another.
 * @param {number} part
 * @param {number} complex
 */
function isPart(part, complex) {
  return (
    DTYPES[part]?.name.startsWith("float") && DTYPES[complex]?.words === 2 && DTYPES[part].bits === DTYPES[complex].bits
  );
}
