// Decode files that stdin lists, as JSON of [base64, options], and print for each what became of it.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const digest = ({ buffer, byteOffset, byteLength }) =>
  createHash("sha256").update(new Uint8Array(buffer, byteOffset, byteLength)).digest("hex");
const { decode } = await import(pathToFileURL(process.argv[2]).href);

const answers = [];
for (const [data, options] of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    const tensors = Object.entries(await decode(Buffer.from(data, "base64"), options));
    answers.push([null, tensors.map(([name, { dtype, shape, data }]) => [name, [dtype, shape, digest(data)]])]);
  } catch (error) {
    if (error.constructor !== Error) throw error; // a fault of the decoder, not of the file
    answers.push([error.message, null]);
  }
}
process.stdout.write(JSON.stringify(answers));
