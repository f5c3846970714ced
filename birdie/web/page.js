// What the page itself runs: it starts the worker, passes on what the form says, and shows what comes back.

import { addressOf, bytesIn, content, inflated } from "./start.js";

/** @param {string} id @returns {any} */
const element = (id) => document.getElementById(id);
const form = element("form");
const [prompt, temperature, degree, tokens] = ["prompt", "temperature", "degree", "tokens"].map(element);
const [start, stop, state, progress] = ["start", "stop", "state", "progress"].map(element);
const [text, read, written, decodeTime, speed] = ["text", "read", "written", "decode", "speed"].map(element);
const number = (/** @type {number} */ value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** @type {Worker} */
let worker;
let run = 0; // number of the last generation; what a worker says about an earlier one comes too late
let isReady = false;
let isRunning = false;
/** @type {any} */
let newest = null; // what the worker said last, to be shown with the next frame

async function load() {
  const program = await inflated("program").arrayBuffer();
  const { settings } = content;
  worker = new Worker(addressOf(content.worker));
  worker.onmessage = ({ data }) => receive(data);
  worker.onerror = (event) => fail(event.message || "the browser does not start a worker here; open the page in another one");
  const model = bytesIn("model");
  const pageBytes = Number(document.body.dataset.bytes);
  element("page-bytes").textContent = `${number(pageBytes)} bytes`;
  element("code-bytes").textContent = `${number(pageBytes - model.length)} bytes`;
  const file = model.buffer.slice(0, model.byteLength);
  state.textContent = `Decoding ${number(settings.weights)} weights`;
  worker.postMessage({ kind: "load", program, file, settings }, [program, file]);
}

/** @param {any} message */
function receive(message) {
  if (message.kind === "error") fail(message.message);
  else if (message.kind === "ready") {
    isReady = true;
    decodeTime.textContent = `${number(message.seconds, 2)} s, ${number(message.weights / message.seconds / 1e6, 1)} M weights/s`;
    update("Ready");
  } else if (message.run === run && isRunning) {
    if (!newest) requestAnimationFrame(show);
    newest = message;
    if (message.kind === "end") show();
  }
}

/** Show the newest message of the worker. */
function show() {
  const message = newest;
  newest = null;
  if (!message || message.run !== run) return;
  read.textContent = message.prompt;
  if (message.kind === "read") {
    progress.value = message.share;
    return;
  }
  const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  written.textContent = message.text;
  if (isAtEnd) text.scrollTop = text.scrollHeight;
  progress.value = message.tokens / Number(tokens.value);
  if (message.tokens) speed.textContent = `${number(message.tokens / message.seconds)} tokens/s`;
  if (message.kind === "end") end(message.isDocumentEnd ? `Done: the text ended after ${number(message.tokens)} tokens` : `Done: ${number(message.tokens)} tokens`);
}

function generate() {
  if (!isReady || isRunning || !form.reportValidity()) return;
  run++;
  isRunning = true;
  newest = null;
  read.textContent = written.textContent = "";
  progress.value = 0;
  text.setAttribute("aria-busy", "true"); // a screen reader reads the text once it is complete
  update("Generating");
  worker.postMessage({ kind: "generate", run, prompt: prompt.value, temperature: Number(temperature.value), tokens: Number(tokens.value) });
}

function cancel() {
  if (!isRunning) return;
  worker.postMessage({ kind: "stop" });
  show();
  end("Stopped");
}

/** @param {string} says */
function end(says) {
  isRunning = false;
  text.removeAttribute("aria-busy");
  update(says);
}

/** @param {string} says */
function update(says) {
  const hadFocus = document.activeElement === start || document.activeElement === stop;
  state.textContent = says;
  progress.hidden = !isRunning;
  start.disabled = !isReady || isRunning;
  stop.disabled = !isRunning;
  if (hadFocus) (isRunning ? stop : start).focus(); // a button that is disabled loses the focus
}

/** @param {string} message */
function fail(message) {
  isReady = false;
  end(`Error: ${message}`);
}

const showDegree = () => (degree.textContent = Number(temperature.value).toFixed(2));
temperature.addEventListener("input", showDegree);
form.addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  generate();
});
prompt.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  generate();
});
stop.addEventListener("click", cancel);
document.addEventListener("keydown", (event) => event.key === "Escape" && cancel());
showDegree();
load().catch((error) => fail(error.message));
