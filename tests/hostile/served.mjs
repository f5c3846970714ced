// Decode files that come over stdin, as long as there are any, and write one line of JSON for each.
//
//   request: most bytes, length of the file (32 bits each, little-endian), the file
//   answer: {tensors: [[name, dtype, shape, digest] …]}, {refused: message} or {fault: stack}: an exception that is no
//           sentence about the file
import { createHash } from "node:crypto";
import { readFileSync, readSync, writeSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [decoder, program] = process.argv.slice(2);
const { decode, useProgram } = await import(pathToFileURL(decoder).href);
useProgram(readFileSync(program));

const digest = ({ buffer, byteOffset, byteLength }) =>
  createHash("sha256").update(new Uint8Array(buffer, byteOffset, byteLength)).digest("hex");

async function answer(maxBytes, file) {
  try {
    const tensors = Object.entries(await decode(file, { maxBytes }));
    return { tensors: tensors.map(([name, { dtype, shape, data }]) => [name, dtype, shape, digest(data)]) };
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

for (let head; (head = next(8));) {
  const [most, length] = new Uint32Array(head.buffer);
  const line = Buffer.from(`${JSON.stringify(await answer(most, next(length)))}\n`);
  for (let at = 0; at < line.length;) at += writeSync(1, line, at);
}
