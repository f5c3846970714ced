// The script that a page begins with: it unpacks the rest, which is compressed.

import { bytesOf } from "./units.js";

/** Return the bytes that a script element holds. @param {string} id */
export function bytesIn(id) {
  const data = /** @type {HTMLElement} */ (document.getElementById(id));
  const bytes = bytesOf(data.textContent ?? "", Number(data.dataset.bytes));
  data.remove();
  return bytes;
}

/** Return what zlib has compressed. @param {string} id of the element that holds it */
export function inflated(id) {
  const stream = new Blob([/** @type {any} */ (bytesIn(id))]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream);
}

/** Return the address of a script. @param {string} code */
export function addressOf(code) {
  return URL.createObjectURL(new Blob([code], { type: "text/javascript;charset=utf-8" }));
}

/** Texts of the page: its body, its script, that of its worker, and settings. @type {any} */
export let content;

async function unpack() {
  if (document.characterSet !== "UTF-16LE") {
    throw new Error(`this page is read as ${document.characterSet}, but it is UTF-16; copy it byte by byte, with its first two bytes`);
  }
  if (!("DecompressionStream" in window)) throw new Error("this browser is from before 2023; use a newer one");
  content = await inflated("content").json();
  document.getElementById("state")?.remove(); // the body has another
  document.body.insertAdjacentHTML("afterbegin", content.body);
  const script = document.createElement("script");
  script.src = addressOf(content.script);
  document.body.append(script);
}

/** @param {Error} error */
function refuse(error) {
  const state = document.getElementById("state");
  if (state) state.textContent = `Error: ${error.message}`;
}

// the data follow this script
document.addEventListener("DOMContentLoaded", () => unpack().catch(refuse));
