// Decode the file on stdin and print how much work that took JavaScript: how often each block of the decoder's code ran,
// and how many elements or characters the methods of the engine went through.
import { readFileSync } from "node:fs";
import { Session } from "node:inspector";
import { pathToFileURL } from "node:url";

const module = await import(pathToFileURL(process.argv[2]).href);
module.useProgram(readFileSync(process.argv[3]));
const data = new Uint8Array(readFileSync(0));
let elements = 0;

/** Count the elements of what methods take (`this`, or the argument) or return. */
function count(prototype, sizes) {
  for (const [name, sizeOf] of Object.entries(sizes)) {
    const method = prototype[name];
    prototype[name] = function (...items) {
      const result = method.apply(this, items);
      elements += sizeOf(this, items[0], result) || 0;
      return result;
    };
  }
}

const own = (self) => self.length;
const result = (_, __, made) => made.length;
count(Array.prototype, { slice: result, concat: result, splice: own, shift: own, unshift: own, join: own });
count(Array.prototype, { includes: own, indexOf: own, lastIndexOf: own, sort: own, flat: result });
count(Object.getPrototypeOf(Uint8Array.prototype), { slice: result, set: (_, some) => some.length, fill: own });
count(String.prototype, { slice: result, includes: own, indexOf: own, lastIndexOf: own, replaceAll: own, split: own });
const { next } = Object.getPrototypeOf([][Symbol.iterator]());
Object.getPrototypeOf([][Symbol.iterator]()).next = function () {
  elements++;
  return next.call(this);
};

const session = new Session();
session.connect();
session.post("Profiler.enable");
session.post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });
session.post("Profiler.takePreciseCoverage");
try {
  await module.decode(data);
} catch (error) {
  if (error.constructor !== Error) throw error;
}
const spread = elements;
session.post("Profiler.takePreciseCoverage", (problem, coverage) => {
  if (problem) throw problem;
  const blocks = coverage.result
    .filter(({ url }) => url.includes("/decoder.js"))
    .flatMap(({ functions }) => functions.flatMap(({ ranges }) => ranges.map((range) => range.count)));
  process.stdout.write(`${blocks.reduce((sum, one) => sum + one, spread)}\n`);
});
