// The worker of the page: decodes the model, then generates text, and looks for messages between two tokens.
//
//   page ─► {kind: "load", program, file, settings} ─► {kind: "ready", seconds, weights}
//   page ─► {kind: "generate", run, prompt, temperature, tokens} ─► {kind: "text", run, …} … {kind: "end", run, …}
//   page ─► {kind: "stop"}: no token is computed after the one that is being computed

import { decode, useProgram } from "../standalone/javascript/decoder.js";
import { Model, draw } from "./model.js";
import { createTokenizer } from "./tokenizer.js";

const FRAME = 16; // milliseconds that a screen shows a picture: the page hears of the text no more often

/** @type {Model} */
let model;
/** @type {ReturnType<typeof createTokenizer>} */
let tokenizer;
/** @type {any} */
let settings;
let current = 0; // the run that generates; 0: none

const channel = new MessageChannel();
/** Let messages in; a timer would wait for milliseconds. */
const turn = () =>
  new Promise((resolve) => {
    channel.port1.onmessage = resolve;
    channel.port2.postMessage(null);
  });

onmessage = async ({ data }) => {
  try {
    if (data.kind === "load") await load(data);
    if (data.kind === "stop") current = 0;
    if (data.kind === "generate") await generate(data);
  } catch (error) {
    current = 0;
    postMessage({ kind: "error", message: error instanceof Error ? error.message : String(error) });
  }
};

/** @param {{program: ArrayBuffer, file: ArrayBuffer, settings: any}} message */
async function load({ program, file, settings: received }) {
  settings = received;
  const start = performance.now();
  useProgram(program);
  const tensors = await decode(file);
  const seconds = (performance.now() - start) / 1000;
  model = new Model(settings.plan, tensors);
  tokenizer = createTokenizer(settings.tokenizer);
  postMessage({ kind: "ready", seconds, weights: settings.weights });
}

/** @param {{run: number, prompt: string, temperature: number, tokens: number}} message */
async function generate({ run, prompt: text, temperature, tokens }) {
  current = run;
  const { bos, vocabulary } = settings;
  const promptIds = tokenizer.encode(text);
  const prompt = tokenizer.decode(promptIds); // as the tokenizer normalizes it
  const ids = [bos, ...promptIds];
  model.reset();
  /** @type {Float32Array} */
  let logits = model.logits;
  for (let i = 0; i < ids.length; i++) {
    logits = model.step(ids[i], i === ids.length - 1);
    await turn();
    if (current !== run) return;
    postMessage({ kind: "read", run, prompt, share: (i + 1) / ids.length });
  }
  const begin = performance.now();
  let reported = 0;
  /** @type {number[]} */
  const output = [];
  let written = "";
  let isDocumentEnd = false;
  const report = (/** @type {string} */ kind) => {
    const all = tokenizer.decode([...promptIds, ...output]).slice(prompt.length);
    // else its last character lacks bytes, which later tokens hold
    if (kind === "end" || !all.endsWith("\ufffd")) written = all;
    const seconds = (performance.now() - begin) / 1000;
    postMessage({ kind, run, prompt, text: written, tokens: output.length, seconds, isDocumentEnd });
  };
  while (output.length < tokens) {
    const token = draw(logits, vocabulary, temperature);
    isDocumentEnd = token === bos; // the token that begins the next document
    if (isDocumentEnd) break;
    output.push(token);
    if (performance.now() - reported > FRAME) {
      report("text");
      reported = performance.now();
    }
    if (output.length < tokens) logits = model.step(token);
    await turn();
    if (current !== run) return;
  }
  current = 0;
  report("end");
}
