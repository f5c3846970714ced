/** Bytes of a file that may be hostile: a cursor that believes no count, CRC-32, and inflate (RFC 1951). */

/**
 * Throw an Error: one sentence that says what is wrong, and where.
 * @param {string} message
 * @returns {never}
 */
export function fail(message) {
  throw new Error(message.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "?")); // names may have line breaks
}

/** Numbers of a header in order. */
export class Cursor {
  /**
   * @param {Uint8Array} data
   * @param {string} where name of what is read, for messages
   */
  constructor(data, where) {
    this.data = data;
    this.where = where;
    this.position = 0;
  }

  /**
   * @param {string} what
   * @returns {never}
   */
  fail(what) {
    fail(`${this.where} is damaged near byte ${this.position}: ${what}`);
  }

  /**
   * Return the next `count` bytes.
   * @param {number} count
   */
  take(count) {
    if (count > this.data.length - this.position) this.fail("it ends too early");
    this.position += count;
    return this.data.subarray(this.position - count, this.position);
  }

  /**
   * Return the next LEB128 number, which has no needless bytes; above 2**53 it is rounded.
   * @param {number} limit
   * @param {string} what
   */
  varint(limit, what) {
    let value = 0;
    let unit = 1;
    for (let count = 1; ; count++) {
      const byte = this.take(1)[0];
      value += (byte & 127) * unit;
      unit *= 128;
      if (byte < 128) {
        if (value > limit || (byte === 0 && count > 1) || (count === 10 && byte > 1)) {
          this.fail(`${what} ${value} is above ${limit} or has needless bytes`);
        }
        return value;
      }
      if (count === 10) this.fail(`${what} has too many bytes`);
    }
  }

  /**
   * Return a count of fields of a byte or more each; more of them than bytes are left is damage.
   * @param {number} limit
   * @param {string} what
   */
  count(limit, what) {
    const value = this.varint(limit, what);
    if (value > this.data.length - this.position) this.fail(`${what} ${value} is more than it can hold`);
    return value;
  }
}

const CRC = new Int32Array(256).map((_, i) => {
  for (let k = 0; k < 8; k++) i = (i >>> 1) ^ (-(i & 1) & 0xedb88320);
  return i;
});

/**
 * Return the CRC-32 of zlib.
 * @param {Uint8Array} data
 */
export function crc32(data) {
  let crc = -1;
  for (let i = 0; i < data.length; i++) crc = (crc >>> 8) ^ CRC[(crc ^ data[i]) & 255];
  return ~crc >>> 0;
}

/** Bits, low one first. */
class Bits {
  /** @param {Uint8Array} data */
  constructor(data) {
    this.data = data;
    this.position = 0;
    this.buffer = 0;
    this.count = 0;
  }

  /** @param {number} need at most 16 */
  take(need) {
    while (this.count < need) {
      if (this.position === this.data.length) fail("packed data ends too early");
      this.buffer |= this.data[this.position++] << this.count;
      this.count += 8;
    }
    const value = this.buffer & ((1 << need) - 1);
    this.buffer >>>= need;
    this.count -= need;
    return value;
  }

  /**
   * Return the next symbol of a canonical Huffman code.
   * @param {Huffman} code
   */
  symbol(code) {
    let word = 0;
    let first = 0;
    let index = 0;
    for (let length = 1; length < 16; length++) {
      word |= this.take(1);
      const count = code.counts[length];
      if (word - count < first) return code.symbols[index + (word - first)];
      index += count;
      first = (first + count) << 1;
      word <<= 1;
    }
    return fail("packed data has an unknown code");
  }
}

/** Canonical Huffman code of symbols that have these lengths, 0 for none. */
class Huffman {
  /** @param {Uint8Array} lengths */
  constructor(lengths) {
    this.counts = new Uint16Array(16);
    for (const length of lengths) this.counts[length]++;
    /** Codes that are free: below 0 there are too many symbols. */
    this.left = 1;
    for (let length = 1; length < 16; length++) {
      this.left = 2 * this.left - this.counts[length];
      if (this.left < 0) fail("packed data has an impossible code");
    }
    const starts = new Uint16Array(17);
    for (let length = 1; length < 16; length++) starts[length + 1] = starts[length] + this.counts[length];
    this.symbols = new Uint16Array(lengths.length);
    lengths.forEach((length, symbol) => {
      if (length) this.symbols[starts[length]++] = symbol;
    });
  }

  /** Return whether every code has a symbol, or there is but one symbol, of one bit. */
  get complete() {
    return this.left === 0 || this.counts[0] + this.counts[1] === this.symbols.length;
  }
}

const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/**
 * Read the codes of a block: of literals and lengths, and of distances.
 * @param {Bits} bits
 * @returns {[Huffman, Huffman]}
 */
function dynamicCodes(bits) {
  const literals = bits.take(5) + 257;
  const distances = bits.take(5) + 1;
  const given = bits.take(4) + 4;
  if (literals > 286 || distances > 30) fail("packed data has too many codes");
  const lengths = new Uint8Array(19);
  for (let i = 0; i < given; i++) lengths[ORDER[i]] = bits.take(3);
  const code = new Huffman(lengths);
  if (code.left) fail("packed data has an incomplete code");
  const all = new Uint8Array(literals + distances);
  for (let i = 0; i < all.length;) {
    const symbol = bits.symbol(code);
    if (symbol < 16) {
      all[i++] = symbol;
      continue;
    }
    const value = symbol === 16 ? (i ? all[i - 1] : fail("packed data repeats nothing")) : 0;
    const count = symbol === 18 ? 11 + bits.take(7) : 3 + bits.take(symbol - 14);
    if (i + count > all.length) fail("packed data has too many lengths");
    all.fill(value, i, i + count);
    i += count;
  }
  const codes = [new Huffman(all.subarray(0, literals)), new Huffman(all.subarray(literals))];
  if (!all[256] || !codes.every((one) => one.complete)) fail("packed data has an incomplete code");
  return /** @type {[Huffman, Huffman]} */ (codes);
}

/** @returns {[Huffman, Huffman]} */
function fixedCodes() {
  const lengths = new Uint8Array(288).fill(8, 0, 144).fill(9, 144, 256).fill(7, 256, 280).fill(8, 280);
  return [new Huffman(lengths), new Huffman(new Uint8Array(30).fill(5))];
}

/**
 * Undo raw deflate.
 * @param {Uint8Array} packed unpacks to exactly `length` bytes, and nothing follows
 * @param {number} length
 */
export function inflate(packed, length) {
  const out = new Uint8Array(length);
  const bits = new Bits(packed);
  let at = 0;
  for (let last = 0; !last;) {
    last = bits.take(1);
    const kind = bits.take(2);
    if (kind === 3) fail("packed data has an unknown block");
    if (kind === 0) {
      bits.buffer = bits.count = 0;
      const count = bits.take(16);
      if (bits.take(16) !== (~count & 0xffff)) fail("packed data has a block of the wrong length");
      if (at + count > length || bits.position + count > packed.length) fail("packed data has the wrong length");
      out.set(packed.subarray(bits.position, bits.position + count), at);
      bits.position += count;
      at += count;
      continue;
    }
    const [literals, distances] = kind === 1 ? fixedCodes() : dynamicCodes(bits);
    for (let symbol = bits.symbol(literals); symbol !== 256; symbol = bits.symbol(literals)) {
      if (symbol < 256) {
        if (at === length) fail("packed data is too long");
        out[at++] = symbol;
        continue;
      }
      const step = symbol - 257;
      if (step > 28) fail("packed data has an unknown length");
      const extra = step < 8 || step === 28 ? 0 : (step >> 2) - 1;
      const base = step === 28 ? 258 : step < 8 ? step + 3 : ((4 | (step & 3)) << extra) + 3;
      const count = base + bits.take(extra);
      const far = bits.symbol(distances);
      if (far > 29) fail("packed data has an unknown distance");
      const more = far < 4 ? 0 : (far >> 1) - 1;
      const back = (far < 4 ? far + 1 : ((2 | (far & 1)) << more) + 1) + bits.take(more);
      if (back > at || at + count > length) fail("packed data points outside");
      for (const end = at + count; at < end; at++) out[at] = out[at - back];
    }
  }
  if (at !== length || bits.position !== packed.length) fail("packed data has the wrong length");
  return out;
}
