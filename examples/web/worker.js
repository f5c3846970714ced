// Decodes a .birdie file of an ONNX model, and runs the model with onnxruntime-web.
//
//   page ─► {kind: "load", address} ─► {kind: "progress", share} … {kind: "ready", fileBytes, modelBytes, seconds, inputs}
//   page ─► {kind: "run", feeds?: {name: {shape, values}}} ─► {kind: "outputs", outputs: {name: {shape, values}}}
//   {kind: "error", message} where something is wrong

import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { toOnnxFiles } from "./decode.js";

ort.env.wasm.numThreads = 1; // more need the headers of cross-origin isolation

/** @type {ort.InferenceSession} */
let session;

onmessage = async ({ data }) => {
  try {
    if (data.kind === "load") await load(data.address);
    if (data.kind === "run") await run(data.feeds ?? {});
  } catch (error) {
    postMessage({ kind: "error", message: error instanceof Error ? error.message : String(error) });
  }
};

/** @param {string} address of the .birdie file */
async function load(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address} cannot be fetched: ${response.status} ${response.statusText}`);
  const file = await response.arrayBuffer();
  const start = performance.now();
  const files = await toOnnxFiles(file, {
    onProgress: (done, total) => postMessage({ kind: "progress", share: done / total }),
  });
  const seconds = (performance.now() - start) / 1000;
  // The first file is the model; a large one has its weights in others beside it.
  const [[, model], ...others] = Object.entries(files);
  session = await ort.InferenceSession.create(model, { externalData: others.map(([path, data]) => ({ path, data })) });
  const inputs = session.inputMetadata.map(({ name, shape, type }) => ({ name, shape, type }));
  postMessage({ kind: "ready", fileBytes: file.byteLength, modelBytes: model.length, seconds, inputs });
}

/** @param {Record<string, { shape: number[], values: ArrayLike<number> }>} given inputs of float32; others are zeros, axes of any size 1 */
async function run(given) {
  const feeds = session.inputMetadata.map(({ name, shape }) => {
    const fixed = given[name]?.shape ?? shape.map((size) => (typeof size === "number" ? size : 1));
    const values = given[name]?.values ?? { length: fixed.reduce((product, size) => product * size, 1) };
    return [name, new ort.Tensor("float32", Float32Array.from(values, (value) => value ?? 0), fixed)];
  });
  const results = await session.run(Object.fromEntries(feeds));
  const outputs = Object.entries(results).map(([name, { dims, data }]) => [name, { shape: [...dims], values: Array.from(data) }]);
  postMessage({ kind: "outputs", outputs: Object.fromEntries(outputs) });
}
