// Bytes as the characters of a page in UTF-16, two bytes a character; birdie/web/units.py writes them and says why.

/**
 * Return the bytes in a text.
 * @param {string} text
 * @param {number} length number of bytes
 * @returns {Uint8Array}
 */
export function bytesOf(text, length) {
  const count = Math.ceil(length / 2);
  const bytes = new Uint8Array(2 * count);
  let flags = 0;
  for (let i = 0; i < count; i++) {
    let unit = text.charCodeAt(i);
    if (unit >> 11 === 11 || unit === 0x8000 || unit === 0x800d || unit === 0x803c) {
      const bits = text.charCodeAt(count + Math.floor(flags / 15)) - 0x4000;
      if ((bits >> flags % 15) & 1) unit ^= 0x8000;
      flags++;
    }
    bytes[2 * i] = unit & 255;
    bytes[2 * i + 1] = unit >> 8;
  }
  if (text.length !== count + Math.ceil(flags / 15)) {
    throw new Error(`the page has ${text.length} characters of data where ${count + Math.ceil(flags / 15)} belong; copy it again, byte by byte`);
  }
  return bytes.subarray(0, length);
}
