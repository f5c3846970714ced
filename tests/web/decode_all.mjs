// Decode files or streams that stdin lists, as JSON of [base64, options…], and print for each what became of it.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const digest = ({ buffer, byteOffset, byteLength }) =>
  createHash("sha256").update(new Uint8Array(buffer, byteOffset, byteLength)).digest("hex");
const [kind, path] = process.argv.slice(2);
const module = await import(pathToFileURL(path).href);

const run = {
  files: (data, maxBytes) =>
    Object.entries(module.decode(data, { maxBytes })).map(([name, { dtype, shape, data }]) => [
      name,
      [dtype, shape, digest(data)],
    ]),
  needs: (data) => module.needs(data),
  stream: (data, coder, rows, columns, states) => {
    const layout = module.streamLayout(rows, columns, -32, states);
    const { values, step } = module.decodeStream(coder, data, layout);
    return digest(step ? values : new Int32Array(rows * columns).fill(values[0]));
  },
}[kind];

const answers = JSON.parse(readFileSync(0, "utf8")).map(([data, ...options]) => {
  try {
    return [null, run(new Uint8Array(Buffer.from(data, "base64")), ...options)];
  } catch (error) {
    if (error.constructor !== Error) throw error; // a fault of the decoder, not of the file
    return [error.message, null];
  }
});
process.stdout.write(JSON.stringify(answers));
