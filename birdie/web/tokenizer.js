// The tokenizers of birdie/gpt/data/tokenizer.py: raw bytes, SentencePiece BPE, and CaseOps above it.
//
//   text ─► normalize (longest prefix of a table) ─► characters ─► merge the pair of the best piece, again and again ─► ids
//
// Python describes a tokenizer in plain JSON (birdie/web/pieces.py). The table of normalization has 225,000 sequences;
// what of it follows from Unicode is left to String.normalize, whose result for a character never changes.

const SPACE = "\u2581";
const UNKNOWN = " \u2047 "; // as SentencePiece decodes it

/**
 * Return the tokenizer of a description.
 * @param {any} description
 * @returns {{encode: (text: string) => number[], decode: (ids: Iterable<number>) => string}}
 */
export function createTokenizer(description) {
  if (description.kind === "bytes") return bytes;
  const pieces = new Pieces(description);
  if (description.kind === "sentencepiece") return pieces;
  return {
    encode: (text) => pieces.encode(encodeCase(pieces.keepsText ? text : pieces.normalize(text).replaceAll(SPACE, " "))),
    decode: (ids) => decodeCase(pieces.decode(ids)),
  };
}

/** Raw UTF-8: id = byte + 4. */
const bytes = {
  encode: (/** @type {string} */ text) => Array.from(new TextEncoder().encode(text), (byte) => byte + 4),
  decode: (/** @type {Iterable<number>} */ ids) => {
    const values = Array.from(ids).filter((id) => id >= 4);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(values, (id) => id - 4));
  },
};

class Pieces {
  /** @param {any} description */
  constructor(description) {
    /** @type {(string | number | null)[]} */
    this.pieces = description.pieces; // a text, a byte, or null for a control id
    this.unknown = description.unknown;
    this.hasBytes = description.hasBytes;
    this.addsSpace = description.addsSpace;
    this.joinsSpaces = description.joinsSpaces;
    this.keepsText = description.keepsText;
    /** @type {Map<string, number>} */
    this.ids = new Map(this.pieces.flatMap((piece, id) => (typeof piece === "string" ? [[piece, id]] : [])));
    /** @type {number[]} */
    this.byteIds = [];
    this.pieces.forEach((piece, id) => typeof piece === "number" && (this.byteIds[piece] = id));
    /** @type {string[]} */
    this.symbols = description.symbols.map((/** @type {number} */ id) => this.pieces[id]);
    this.symbols.sort((a, b) => b.length - a.length);
    this.table = table(description.normalization);
  }

  /** Return `text` as SentencePiece normalizes it, with ▁ for spaces. @param {string} text */
  normalize(text) {
    const characters = Array.from(text);
    let result = "";
    let afterSpace = this.joinsSpaces; // spaces at the beginning are dropped, and those after a space
    let isEmpty = true;
    for (let at = 0; at < characters.length; ) {
      let [part, length] = this.prefix(characters, at);
      at += length;
      if (afterSpace) part = part.replace(/^ +/, "");
      if (!part) continue;
      if (isEmpty && this.addsSpace) result += SPACE;
      isEmpty = false;
      result += part.replaceAll(" ", SPACE);
      afterSpace = this.joinsSpaces && part.endsWith(" ");
    }
    if (this.joinsSpaces) while (result.endsWith(SPACE)) result = result.slice(0, -1);
    return result;
  }

  /**
   * Return the normalized form of the longest known prefix of characters[at …], and its number of characters.
   * @param {string[]} characters
   * @param {number} at
   * @returns {[string, number]}
   */
  prefix(characters, at) {
    const symbol = this.symbolAt(characters, at);
    if (symbol) return [symbol, Array.from(symbol).length];
    /** @type {string[]} */
    const mapped = []; // what each character becomes by itself, as long as that is one character
    while (mapped.length < Math.min(this.table.longest, characters.length - at)) {
      const character = characters[at + mapped.length];
      const value = this.table.single(character) ?? character;
      if (!value || value.length !== String.fromCodePoint(value.codePointAt(0) ?? 0).length) break;
      mapped.push(value);
    }
    for (let length = mapped.length; length > 1; length--) {
      const value = this.table.sequence(mapped.slice(0, length).join(""));
      if (value !== undefined) return [value, length];
    }
    return [this.table.single(characters[at]) ?? characters[at], 1];
  }

  /** Return the user-defined symbol at a position, if there is one. @param {string[]} characters @param {number} at */
  symbolAt(characters, at) {
    return this.symbols.find((symbol) => Array.from(symbol).every((character, i) => characters[at + i] === character));
  }

  /** Return the ids of `text`. @param {string} text @returns {number[]} */
  encode(text) {
    if (this.keepsText && text.includes(SPACE)) {
      const own = Array.from(new TextEncoder().encode(SPACE), (byte) => this.byteIds[byte]); // its piece is a space
      return text.split(SPACE).flatMap((part, i) => (i ? [...own, ...this.encode(part)] : this.encode(part)));
    }
    const characters = Array.from(this.normalize(text));
    /** @type {{text: string, isFrozen: boolean}[]} */
    const parts = [];
    for (let at = 0; at < characters.length; ) {
      const symbol = this.symbolAt(characters, at);
      parts.push({ text: symbol ?? characters[at], isFrozen: symbol !== undefined });
      at += symbol ? Array.from(symbol).length : 1;
    }
    const ids = [];
    let afterUnknown = false;
    for (const piece of this.merge(parts)) {
      const id = this.ids.get(piece);
      if (id !== undefined) ids.push(id);
      else if (this.hasBytes) for (const byte of new TextEncoder().encode(piece)) ids.push(this.byteIds[byte]);
      else if (!afterUnknown) ids.push(this.unknown); // a run of unknown characters is one id
      afterUnknown = id === undefined;
    }
    return ids;
  }

  /**
   * Merge neighbors into the piece with the lowest id, the first of equal ones, until no pair is a piece.
   * @param {{text: string, isFrozen: boolean}[]} parts
   * @returns {string[]}
   */
  merge(parts) {
    const texts = parts.map(({ text }) => text);
    const next = parts.map((_, i) => i + 1);
    const previous = parts.map((_, i) => i - 1);
    const queue = new Queue();
    const add = (/** @type {number} */ left, /** @type {number} */ right) => {
      if (left < 0 || right >= parts.length || parts[left].isFrozen || parts[right].isFrozen) return;
      const id = this.ids.get(texts[left] + texts[right]);
      if (id !== undefined) queue.push({ id, left, right, length: texts[left].length + texts[right].length });
    };
    for (let i = 1; i < parts.length; i++) add(i - 1, i);
    for (let pair = queue.pop(); pair; pair = queue.pop()) {
      const { left, right, length } = pair;
      // one of the two was merged since
      if (!texts[left] || !texts[right] || texts[left].length + texts[right].length !== length) continue;
      texts[left] += texts[right];
      texts[right] = "";
      next[left] = next[right];
      if (next[right] < parts.length) previous[next[right]] = left;
      add(previous[left], left);
      add(left, next[left]);
    }
    return texts.filter(Boolean);
  }

  /** Return the text of `ids`; control ids are nothing, bytes that are no UTF-8 are U+FFFD each. */
  decode(/** @type {Iterable<number>} */ ids) {
    let text = "";
    let hasDropped = false; // a space that only `addsSpace` put at the beginning
    /** @type {number[]} */
    let run = [];
    for (const id of ids) {
      const piece = this.pieces[id];
      if (typeof piece === "number") {
        run.push(piece);
        continue;
      }
      text += utf8(run);
      run = [];
      if (id === this.unknown) text += UNKNOWN;
      if (typeof piece !== "string" || id === this.unknown) continue;
      /** @type {boolean} */
      const isDummy = !text && !hasDropped && (this.addsSpace || this.joinsSpaces) && piece.startsWith(SPACE);
      hasDropped ||= isDummy && !this.joinsSpaces;
      text += piece.slice(isDummy ? 1 : 0).replaceAll(SPACE, " ");
    }
    return text + utf8(run);
  }
}

/** Pairs that may be merged, the lowest id first and of those the leftmost: a binary heap. */
class Queue {
  constructor() {
    /** @type {{id: number, left: number, right: number, length: number}[]} */
    this.items = [];
  }

  /** @param {Queue["items"][0]} item */
  push(item) {
    const { items } = this;
    let at = items.push(item) - 1;
    while (at && isBefore(items[at], items[(at - 1) >> 1])) at = this.swap(at, (at - 1) >> 1);
  }

  pop() {
    const { items } = this;
    const first = items[0];
    const last = items.pop();
    if (!last || !items.length) return first;
    items[0] = last;
    for (let at = 0, child = 1; child < items.length; child = 2 * at + 1) {
      if (child + 1 < items.length && isBefore(items[child + 1], items[child])) child++;
      if (!isBefore(items[child], items[at])) break;
      at = this.swap(at, child);
    }
    return first;
  }

  /** @param {number} a @param {number} b */
  swap(a, b) {
    [this.items[a], this.items[b]] = [this.items[b], this.items[a]];
    return b;
  }
}

/** @param {Queue["items"][0]} a @param {Queue["items"][0]} b */
const isBefore = (a, b) => a.id < b.id || (a.id === b.id && a.left < b.left);

/**
 * Return the two maps of a normalization: of single characters, and of sequences of mapped characters.
 * @param {any} description see birdie/web/pieces.py
 */
function table({ ranges, exceptions, sequences, sequenceExceptions, hasHangul, longest }) {
  const singles = new Map();
  for (const [first, last] of ranges) {
    for (let code = first; code <= last; code++) {
      const character = String.fromCodePoint(code);
      singles.set(character, character.normalize("NFKC"));
    }
  }
  for (const [key, value] of Object.entries(exceptions)) singles.set(key, value);
  const multiple = new Map();
  for (const key of sequences) multiple.set(key, key.normalize("NFKC"));
  for (const [key, value] of Object.entries(sequenceExceptions)) multiple.set(key, value);
  const isHangul = /^[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?$/;
  return {
    longest,
    single: (/** @type {string} */ character) => singles.get(character),
    sequence: (/** @type {string} */ key) => multiple.get(key) ?? (hasHangul && isHangul.test(key) ? key.normalize("NFKC") : undefined),
  };
}

/** Return the text of bytes, with U+FFFD for each byte that is part of no character. @param {number[]} run */
function utf8(run) {
  let text = "";
  for (let at = 0; at < run.length; ) {
    const first = run[at];
    const length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
    let code = length > 1 ? first & (0x7f >> length) : first;
    let isValid = length > 0 && at + length <= run.length;
    for (let i = 1; isValid && i < length; i++) {
      isValid = (run[at + i] & 0xc0) === 0x80;
      code = (code << 6) | (run[at + i] & 0x3f);
    }
    const least = [0, 0, 0x80, 0x800, 0x10000][length];
    isValid = isValid && code >= least && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
    text += isValid ? String.fromCodePoint(code) : "\ufffd";
    at += isValid ? length : 1;
  }
  return text;
}

// CaseOps, as birdie/gpt/data/caseops.py explains it.
const CAPITALS =
  /[A-Z\ue001-\ue004](?:(?<=[\ue001-\ue004])()|(?<![A-Za-z][A-Z])[A-Z]+(?![A-Za-z\u0300-\u036f])()|(?<![A-Za-z][A-Z])(?![\u0300-\u036f])()|(?![\u0300-\u036f])())/g;
const OPERATORS = /(?=[\ue001-\ue004])(?:\ue002[a-z]*|[\ue001\ue003][a-z]?|\ue004[^]?)/gu;
const PREFIXES = ["\ue004", "\ue002", "\ue001", "\ue003"]; // escape, all capitals, title, capital next

/** @param {string} text */
function encodeCase(text) {
  return text.replace(CAPITALS, (match, ...groups) => PREFIXES[groups.slice(0, 4).indexOf("")] + match.toLowerCase());
}

/** @param {string} text */
function decodeCase(text) {
  return text.replace(OPERATORS, (match) => (match[0] === "\ue004" ? match.slice(1) : match.slice(1).toUpperCase()));
}
