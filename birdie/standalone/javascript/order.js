/** Order of names, which a file has as moves from their natural order (docs/format.md, `order`). */

import { fail } from "./decoder.js";

const MOST_PARTS = 32; // of a name

/** @returns {never} */
function noPermutation() {
  return fail("the order of tensors in the metadata of the file is no permutation of their names; it is damaged");
}

/**
 * Compare texts as Python does, by code points: UTF-16 has those beyond U+FFFF before the last ones below.
 * @param {string} one
 * @param {string} other
 */
export function compareTexts(one, other) {
  const [a, b] = [Array.from(one), Array.from(other)];
  const at = a.findIndex((character, i) => character !== b[i]);
  if (at < 0 || at >= b.length) return a.length - b.length;
  return Number(a[at].codePointAt(0)) - Number(b[at].codePointAt(0));
}

/**
 * Compare parts of names in their natural order: digits as numbers, then by how many zeros lead them.
 * @param {string} one
 * @param {string} other
 */
function compareParts(one, other) {
  const [a, b] = [one, other].map((part) => Array.from(part.matchAll(/([^0-9]*)([0-9]*)/g)));
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const [, text, digits] = a[i];
    const [, otherText, otherDigits] = b[i];
    const [number, otherNumber] = [digits, otherDigits].map((some) => some.replace(/^0+/, ""));
    const order =
      compareTexts(text, otherText) ||
      number.length - otherNumber.length ||
      compareTexts(number, otherNumber) ||
      digits.length - otherDigits.length;
    if (order) return order;
  }
  return a.length - b.length;
}

/**
 * Return members in the order that moves make of their natural one.
 * @param {string[]} members
 * @param {unknown[]} moves
 */
function moved(members, moves) {
  const left = [...members];
  const order = [];
  if (moves.length >= left.length) noPermutation();
  let at = 0;
  for (const move of moves) {
    if (!Number.isInteger(move) || Math.abs(Number(move)) >= left.length) noPermutation();
    at = (at + Number(move) + left.length) % left.length;
    order.push(...left.splice(at, 1));
  }
  return [...order, ...left.slice(at), ...left.slice(0, at)];
}

/**
 * Return where the part of a name ends that begins at `start`; 0 if it is the last.
 * @param {string} name
 * @param {string[]} marks
 * @param {number} start
 */
function endOfPart(name, marks, start) {
  let first = Infinity;
  for (const mark of marks) {
    const at = name.indexOf(mark, start);
    if (at >= 0) first = Math.min(first, at + mark.length);
  }
  return first < Infinity ? first : 0;
}

/**
 * Return the beginning that all names have.
 * @param {string[]} names
 */
function sharedBeginning(names) {
  const [first, last] = [names.reduce((a, b) => (a < b ? a : b)), names.reduce((a, b) => (a > b ? a : b))];
  let length = 0;
  while (length < first.length && first[length] === last[length]) length++;
  return first.slice(0, length);
}

/**
 * Return tensors in the order of the state dict.
 * @template {{ name: string }} T
 * @param {T[]} tensors in the order of their names
 * @param {any[]} order the field, of the kind that the format says; empty: they are in that order
 * @returns {T[]}
 */
export function inOrder(tensors, order) {
  if (!order.length) return tensors;
  const marks = Array.from(/** @type {string} */ (order[0]));
  let next = 1;
  /** @type {Map<string, string[]>} members in their natural order, as JSON → in that of the file */
  const known = new Map();

  /** @type {(group: T[], start: number, count: number) => T[]} of names that begin with the same `count` parts */
  const walk = (group, start, count) => {
    if (group.length < 2) return group;
    const shared = sharedBeginning(group.map(({ name }) => name));
    for (let end = 1; count < MOST_PARTS - 1 && (end = endOfPart(shared, marks, start)); count++) start = end;
    /** @type {Map<string, T[]>} */
    const below = new Map();
    for (const tensor of group) {
      const end = count < MOST_PARTS - 1 ? endOfPart(tensor.name, marks, start) : 0;
      const member = tensor.name.slice(start, end || undefined);
      const some = below.get(member);
      if (some) some.push(tensor);
      else below.set(member, [tensor]);
    }
    const members = [...below.keys()].sort(compareParts);
    const key = JSON.stringify(members);
    const ordered = known.get(key) ?? moved(members, order[next++] ?? []);
    known.set(key, ordered);
    // Lists are for sets as they are met: those below the members in their natural order.
    for (const member of members) below.set(member, walk(/** @type {T[]} */ (below.get(member)), start + member.length, count + 1));
    return ordered.flatMap((member) => /** @type {T[]} */ (below.get(member)));
  };
  const ordered = walk(tensors, 0, 0);
  if (next < order.length) noPermutation();
  return ordered;
}
