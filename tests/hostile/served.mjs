// Decode files that come over stdin, as long as there are any, and write one line of JSON for each.
//
//   request: kind (0: tensors, 1: streams), most bytes, length of the file (32 bits each, little-endian), the file
//   answer: {tensors: [[name, dtype, shape, digest] …]} or {streams: [[name, digest] …]}, {refused: message} or
//           {fault: stack}: an exception that is no sentence about the file
import { createHash } from "node:crypto";
import { readSync, writeSync } from "node:fs";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(process.argv[2]).href;
const { decode } = await import(`${folder}/decoder.js`);
const { crc32, fail } = await import(`${folder}/decoder/bytes.js`);
const { openContainer } = await import(`${folder}/decoder/container.js`);
const { decodeStream, streamLayout } = await import(`${folder}/decoder/streams.js`);

const STATES = [1, 4, 8, 16, 32, 64, 128, 256];
const digest = ({ buffer, byteOffset, byteLength }) =>
  createHash("sha256").update(new Uint8Array(buffer, byteOffset, byteLength)).digest("hex");

/** Decode every stream as the shape of its entry. */
function streamsOf(file, most) {
  const { data, entries } = openContainer(file);
  const found = [];
  for (const { name, shape, params, coders, lengths, offset, crc } of entries) {
    if (name.includes("\0")) continue;
    const end = offset + lengths.reduce((sum, length) => sum + length, 0);
    if (end > offset && crc32(data.subarray(offset, end)) !== crc) fail("it fails its checksum");
    const [rows, columns] = [...shape, 1, 1];
    if (rows * columns > most) fail("refused by the bound of the test");
    const layout = streamLayout(rows, columns, -32, params.find((one) => STATES.includes(Math.abs(one))) ?? 1);
    let at = offset;
    coders.forEach((coder, i) => {
      const { values, step } = decodeStream(coder, data.subarray(at, at + lengths[i]), layout);
      found.push([name, digest(step ? values : new Int32Array(rows * columns).fill(values[0]))]);
      at += lengths[i];
    });
  }
  return found;
}

function tensorsOf(file, maxBytes) {
  const tensors = Object.entries(decode(file, { maxBytes }));
  return tensors.map(([name, { dtype, shape, data }]) => [name, dtype, shape, digest(data)]);
}

function answer(kind, most, file) {
  try {
    return kind ? { streams: streamsOf(file, most) } : { tensors: tensorsOf(file, most) };
  } catch (error) {
    const isSentence = error?.constructor === Error && !error.message.includes("\n");
    return isSentence ? { refused: error.message } : { fault: `${error?.stack ?? error}` };
  }
}

/** Return the next bytes of stdin; null at its end. */
function next(length) {
  const data = new Uint8Array(length);
  for (let at = 0; at < length;) {
    const count = readSync(0, data, at, length - at, null);
    if (!count) return null;
    at += count;
  }
  return data;
}

for (let head; (head = next(12));) {
  const [kind, most, length] = new Uint32Array(head.buffer);
  const line = Buffer.from(`${JSON.stringify(answer(kind, most, next(length)))}\n`);
  for (let at = 0; at < line.length;) at += writeSync(1, line, at);
}
