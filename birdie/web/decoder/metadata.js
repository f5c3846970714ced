/** Metadata of a file: a JSON object (docs/format.md, "Metadata"). Python has the same rules in artifact/metadata.py. */

import { fail } from "./bytes.js";

const MAX_VALUES = 2 ** 22;
const MAX_DEPTH = 500;
const MAX_DIGITS = 4300;
const MAX_BYTES = 2 ** 48;
const MAX_MARKS = 8;

/**
 * @typedef {object} Metadata what the decoder uses of it
 * @property {Record<string, string>} [schemes] code → name
 * @property {number[]} [copies] indices of aliases
 * @property {any} [tree] node of a complete checkpoint
 */

/** @param {any} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
/** @param {any} value of metadata, in which only integers are numbers */
const isNatural = (value) => typeof value === "number" && value >= 0;
/** @param {any} value */
const areNames = (value) => isObject(value) && Object.values(value).every((name) => typeof name === "string");
/** @param {any} value @param {string} key */
const hasObject = (value, key) => !Object.hasOwn(value, key) || isObject(value[key]);

/** Kinds of the values of all keys that are known. @type {Record<string, (value: any) => boolean>} */
const KINDS = {
  budget: isNatural,
  metadata: isObject,
  tree: (value) => !isObject(value),
  schemes: areNames,
  files: (value) => isObject(value) && Object.values(value).every((size) => isNatural(size) && size <= MAX_BYTES),
  copies: (value) =>
    Array.isArray(value) && value.every((index, i) => isNatural(index) && (!i || index > value[i - 1])),
  state: (value) =>
    isObject(value) &&
    hasObject(value, "versions") &&
    hasObject(value, "extra") &&
    Object.values(value.versions ?? {}).every((one) => typeof one === "number" || Array.isArray(one)),
  base: (value) =>
    isObject(value) &&
    typeof (Object.hasOwn(value, "of") ? value.of : "") === "string" &&
    typeof (Object.hasOwn(value, "inside") ? value.inside : false) === "boolean" &&
    (!Object.hasOwn(value, "names") || areNames(value.names)),
  order: (value) =>
    Array.isArray(value) &&
    typeof value[0] === "string" &&
    [...value[0]].length <= MAX_MARKS &&
    value.slice(1).every((some) => Array.isArray(some) && some.every((move) => typeof move === "number")),
  link: isObject,
  onnx: Array.isArray,
};

/**
 * Return the metadata of a file.
 * @param {Uint8Array} data
 * @param {number} aliases of the file
 * @returns {Metadata}
 */
export function parseMetadata(data, aliases) {
  if (!data.length) return {};
  const marks = data.reduce((count, byte) => (byte === 44 || byte === 91 || byte === 123 ? count + 1 : count), 0);
  if (marks > MAX_VALUES) fail("the metadata of the file holds more values than birdie writes");
  /** @type {any} */
  let fields;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data.slice());
    JSON.parse(text);
    fields = JSON.parse(withIntegers(text));
  } catch {
    fail("the metadata of the file is not JSON as birdie writes it");
  }
  if (!isObject(fields)) fail("the metadata of the file is not what birdie writes");
  for (const [key, isSound] of Object.entries(KINDS)) {
    if (Object.hasOwn(fields, key) && !isSound(fields[key])) {
      fail(`'${key}' in the metadata of the file is not what birdie writes`);
    }
  }
  if (fields.copies?.some((/** @type {number} */ index) => index >= aliases)) {
    fail("'copies' in the metadata of the file are no indices of aliases");
  }
  return fields;
}

/**
 * Return whether tensors are views of others, which have no entry in the file.
 * @param {any} tree
 */
export function hasViews(tree) {
  const waiting = [tree];
  while (waiting.length) {
    const node = waiting.pop();
    if (!Array.isArray(node)) continue;
    if (node[0] === "view") return true;
    for (const part of node) waiting.push(part);
  }
  return false;
}

/**
 * Return a JSON text with null for each number that is no integer; throw for what JSON allows and the format does not.
 * @param {string} text that is JSON
 */
function withIntegers(text) {
  /** @type {(Set<string> | null)[]} */
  const open = [];
  const parts = [];
  let done = 0;
  for (let at = 0; at < text.length; at++) {
    const mark = text[at];
    if (mark === "{" || mark === "[") {
      open.push(mark === "{" ? new Set() : null);
      if (open.length > MAX_DEPTH) fail("it nests too deep");
    } else if (mark === "}" || mark === "]") open.pop();
    else if (mark === "-" || (mark >= "0" && mark <= "9")) {
      const start = at;
      while ("+-.0123456789Ee".includes(text[at + 1] ?? "x")) at++;
      const token = text.slice(start, at + 1);
      if (!/[.eE]/.test(token)) {
        if (token.length - (mark === "-" ? 1 : 0) > MAX_DIGITS) fail("it has too long an integer");
      } else {
        if (!Number.isFinite(Number(token))) fail("it has a number beyond all finite ones");
        parts.push(text.slice(done, start), "null");
        done = at + 1;
      }
    } else if (mark === '"') {
      const start = at;
      while (text[++at] !== '"') if (text[at] === "\\") at++;
      const end = at + 1;
      while (" \t\n\r".includes(text[at + 1] ?? "x")) at++;
      if (text[at + 1] !== ":") continue;
      const key = JSON.parse(text.slice(start, end));
      const keys = open[open.length - 1];
      if (keys?.has(key)) fail(`the key ${key} is repeated`);
      keys?.add(key);
    }
  }
  return parts.join("") + text.slice(done);
}
