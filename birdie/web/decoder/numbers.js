/** Side information: small numbers by adaptive binary models and binary rANS (docs/coders.md, "Numbers"). */

import { Cursor, fail } from "./bytes.js";

const LENGTHS = 35;
const SLOTS = LENGTHS + 8 * LENGTHS;
const MAX_NUMBER = 2 ** 34 - 1;

/**
 * Map 0, 1, 2, 3, … to 0, −1, 1, −2, …
 * @param {number} number
 */
export function unzigzag(number) {
  return number % 2 ? -(number + 1) / 2 : number / 2;
}

/**
 * Return a copy of bytes as little-endian words, and so many zeros after them.
 * @param {Uint8Array} bytes an even number
 * @param {number} [padding]
 */
export function words16(bytes, padding = 0) {
  const words = new Uint16Array(bytes.length / 2 + padding);
  new Uint8Array(words.buffer).set(bytes);
  return words;
}

/** Decoder of numbers, each in a context. */
export class Numbers {
  /** @param {Uint8Array} bytes two for each word */
  constructor(bytes) {
    if (bytes.length < 4 || bytes.length % 2) fail("the side information of a stream is missing");
    this.words = words16(bytes);
    this.x = (this.words[0] | (this.words[1] << 16)) >>> 0;
    this.position = 2;
    this.probabilities = new Uint16Array(96 * SLOTS).fill(1 << 15);
    this.counts = new Uint8Array(96 * SLOTS);
  }

  /**
   * Return a bit; a slot below 0 is a bit without a model.
   * @param {number} slot
   */
  bit(slot) {
    const p = slot < 0 ? 1 << 15 : this.probabilities[slot];
    const ones = Math.min(Math.max(p >> 1, 32), 32736);
    const rest = this.x & 32767;
    const bit = rest < ones ? 1 : 0;
    let x = bit ? ones * (this.x >>> 15) + rest : (32768 - ones) * (this.x >>> 15) + rest - ones;
    if (x < 65536) {
      x = x * 65536 + (this.position < this.words.length ? this.words[this.position] : 0);
      this.position++;
    }
    this.x = x;
    if (slot >= 0) {
      const count = this.counts[slot];
      this.probabilities[slot] =
        p + Math.floor((((bit ? 65535 : 0) - p) * Math.floor(131072 / (2 * count + 3))) / 65536);
      if (count < 60) this.counts[slot] = count + 1;
    }
    return bit;
  }

  /**
   * Return a number, 0 … 2**34 − 1.
   * @param {number} context
   */
  number(context) {
    const base = context * SLOTS;
    let length = 0;
    while (length < LENGTHS - 1 && this.bit(base + length)) length++;
    const tree = base + LENGTHS + 8 * length;
    let number = 1;
    for (let i = 0; i < length; i++) number = 2 * number + this.bit(i < 3 ? tree + number : -1);
    if (number > MAX_NUMBER + 1) fail("a number in a stream is above 2^34 − 1");
    return number - 1;
  }

  /**
   * Return a number that is at most `limit`.
   * @param {number} context
   * @param {number} limit
   * @param {string} what
   */
  take(context, limit, what) {
    const number = this.number(context);
    if (number > limit) fail(`${what} of a stream is ${number}, the most is ${limit}`);
    return number;
  }

  /** @param {number} context */
  signed(context) {
    return unzigzag(this.number(context));
  }

  /**
   * Return `count` numbers, each in the context `context` + min(number before, most).
   * @param {number} context
   * @param {number} count
   * @param {number} [most]
   */
  chain(context, count, most = 0) {
    const out = new Float64Array(count);
    let number = 0;
    for (let i = 0; i < count; i++) out[i] = number = this.number(context + Math.min(number, most));
    return out;
  }

  /** Check that every word was read, and that the state is the one that encoding began with. */
  finish() {
    if (this.x !== 65536 || this.position !== this.words.length) {
      fail("the side information of a stream does not end where it should");
    }
  }
}

/**
 * Return the side information of a stream and the bytes after it.
 * @param {Uint8Array} payload
 * @returns {[Numbers, Uint8Array]}
 */
export function opened(payload) {
  const cursor = new Cursor(payload, "a coded stream");
  const side = cursor.take(2 * cursor.varint(payload.length / 2, "length of the side information"));
  return [new Numbers(side), payload.subarray(cursor.position)];
}
