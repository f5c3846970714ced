// The GPT of birdie/model, one token at a time with a KV cache: all of its techniques, in float32 with float64 sums.
//
//   token ─► embedding ─► norm = x₀ ─► layers (U-Net skips; keys and values of this position are stored) ─► norm ─► logits
//
// A position attends to the last `context` positions, as in birdie/gpt/model/cache.py with chunks of one token. The plan
// that Python writes (birdie/web/plan.py) has the shape of the model and the order in which its layers run.

import { toFloat32 } from "../standalone/javascript/decoder.js";

const EPSILON = 1.1920928955078125e-7; // of float32, as torch's rms_norm adds it to the mean square
const MULTIPLIERS = [36313, 27191, 51497]; // of birdie/gpt/model/techniques/ngram_embedding.py

/**
 * Write W · x into `out`, for W (out.length, x.length), row by row.
 * @param {Float32Array} out
 * @param {Float32Array} weight
 * @param {Float32Array} x
 */
function multiply(out, weight, x) {
  const rows = out.length;
  const columns = x.length;
  let row = 0;
  for (; row + 3 < rows; row += 4) {
    // four rows at a time: twice as fast as one, as each x is read once
    const first = row * columns;
    const second = first + columns;
    const third = second + columns;
    const fourth = third + columns;
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let column = 0; column < columns; column++) {
      const value = x[column];
      a += weight[first + column] * value;
      b += weight[second + column] * value;
      c += weight[third + column] * value;
      d += weight[fourth + column] * value;
    }
    out[row] = a;
    out[row + 1] = b;
    out[row + 2] = c;
    out[row + 3] = d;
  }
  for (; row < rows; row++) {
    let sum = 0;
    for (let column = 0; column < columns; column++) sum += weight[row * columns + column] * x[column];
    out[row] = sum;
  }
}

/**
 * Write x[start … start + length) over its root mean square, times `scale`, into `out` from `start` on.
 * @param {Float32Array} out
 * @param {Float32Array} x
 */
function norm(out, x, scale = 1, start = 0, length = x.length) {
  let sum = 0;
  for (let i = start; i < start + length; i++) sum += x[i] * x[i];
  const factor = scale / Math.sqrt(sum / length + EPSILON);
  for (let i = start; i < start + length; i++) out[i] = x[i] * factor;
}

const sigmoid = (/** @type {number} */ x) => 1 / (1 + Math.exp(-x));

/**
 * The shape of a model, as `model_plan` of birdie/web/plan.py writes it.
 * @typedef {{ inputScale: number, isJoint: boolean, isExclusive: boolean, window: number,
 *     valueEmbedding: number | null }} LayerPlan
 * @typedef {{ context: number, vocabulary: number, dim: number, tokenDim: number, isFactored: boolean,
 *     isTied: boolean, heads: number, kvHeads: number, headDim: number, rotaryDims: number, ropeBase: number,
 *     bos: number, isolateDocuments: boolean, encoder: number[], decoder: number[], layers: LayerPlan[],
 *     dividesAt: number | null, skipGates: boolean, ngramRows: number, trigram: boolean, smear: string,
 *     valueResidual: boolean, gate: string, gateScale: number, activation: string, leakySlope: number,
 *     softcap: string, cap: number }} Plan
 */

/** A GPT and the keys and values of one stream of tokens. */
export class Model {
  /**
   * @param {Plan} plan
   * @param {Record<string, {dtype: string, shape: number[], data: ArrayLike<number>}>} tensors
   */
  constructor(plan, tensors) {
    this.plan = plan;
    /** @type {Map<string, Float32Array>} */
    this.weights = new Map();
    for (const [name, tensor] of Object.entries(tensors)) this.weights.set(name, toFloat32(tensor));
    const { dim, kvHeads, headDim, context } = plan;
    this.layers = plan.layers.map((_, index) => this.layer(index));
    this.runs = [...plan.encoder, ...plan.decoder];
    const kvDim = kvHeads * headDim;
    // keys and values of each run of a layer: a repeated layer has some for each time it runs
    this.keys = this.runs.map(() => new Float32Array(context * kvDim));
    this.values = this.runs.map(() => new Float32Array(context * kvDim));
    const hidden = this.layers[0].up.length / dim;
    const vector = (length = dim) => new Float32Array(length);
    this.x = vector();
    this.x0 = vector();
    this.second = vector();
    this.input = vector();
    this.normed = vector();
    this.branch = vector();
    this.attended = vector();
    this.query = vector();
    this.key = vector(kvDim);
    this.value = vector(kvDim);
    this.firstValues = vector(kvDim);
    this.hidden = vector(hidden);
    this.gate = vector(hidden);
    this.shares = vector(context);
    this.previous = vector(); // embedding of the token before, for smear
    this.outputs = plan.encoder.map(() => vector());
    this.logits = vector(plan.vocabulary);
    this.narrow = vector(plan.tokenDim);
    const dims = plan.rotaryDims;
    this.frequencies = Float32Array.from({ length: dims / 2 }, (_, i) => plan.ropeBase ** -Math.fround((2 * i) / dims));
    this.cos = vector(dims / 2);
    this.sin = vector(dims / 2);
    this.position = 0;
    this.documentStart = 0;
    this.recent = [0, 0]; // the last two tokens, the newest first
  }

  /** Forget all tokens. */
  reset() {
    this.position = this.documentStart = 0;
    this.recent = [0, 0];
  }

  /** @param {string} name */
  weight(name) {
    const weight = this.weights.get(name);
    if (!weight) throw new Error(`the model has no tensor ${name}; export it again`);
    return weight;
  }

  /** @param {number} index */
  layer(index) {
    const of = (/** @type {string} */ name) => this.weight(`blocks.${index}.${name}`);
    const { gate, activation, valueResidual } = this.plan;
    return {
      mix: of("resid_mix"),
      query: of("attn.c_q.weight"),
      key: of("attn.c_k.weight"),
      value: of("attn.c_v.weight"),
      out: of("attn.proj.weight"),
      gain: of("attn.q_gain"),
      headGate: gate === "none" ? null : of("attn.head_gate"),
      valueMix: valueResidual ? of("attn.value_mix") : null,
      attentionScale: of("attn_scale"),
      up: of("mlp.fc.weight"),
      upGate: activation === "swiglu" ? of("mlp.gate.weight") : null,
      down: of("mlp.proj.weight"),
      mlpScale: of("mlp_scale"),
    };
  }

  /**
   * Pass `token` through the model; return the logits of the next one, valid until the next call.
   * @param {number} token
   * @param {boolean} wanted whether the logits are; without them the last product is left out
   * @returns {Float32Array}
   */
  step(token, wanted = true) {
    const { plan, x, x0 } = this;
    if (token === plan.bos && plan.isolateDocuments) this.documentStart = this.position;
    this.embed(token);
    this.setAngles();
    x0.set(x);
    let isDivided = false;
    const half = plan.encoder.length;
    let pushed = 0;
    for (let run = 0; run < this.runs.length; run++) {
      const index = this.runs[run];
      if (run >= half && pushed) this.addSkip(run - half, this.outputs[--pushed]);
      if (index === plan.dividesAt) {
        this.second.set(x);
        isDivided = true;
      }
      if (isDivided) this.runStreams(run, index, token);
      else this.runLayer(run, index, token);
      if (run < half) this.outputs[pushed++].set(x);
    }
    if (isDivided) for (let i = 0; i < x.length; i++) x[i] = (x[i] + this.second[i]) / 2;
    norm(x, x);
    this.position++;
    this.recent = [token, this.recent[0]];
    return wanted ? this.head() : this.logits;
  }

  /** Write the normalized embedding of `token` into x. @param {number} token */
  embed(token) {
    const { plan, x, previous, narrow } = this;
    const row = this.weight("tok_emb.weight").subarray(token * plan.tokenDim, (token + 1) * plan.tokenDim);
    if (plan.isFactored) {
      narrow.set(row);
      multiply(x, this.weight("embed_proj.weight"), narrow);
    } else x.set(row);
    if (plan.ngramRows) this.addNgrams(token);
    const hasPredecessor = this.position > 0 && token !== plan.bos;
    if (plan.smear === "gated") {
      const gate = this.weight("smear.gate");
      let sum = 0;
      for (let i = 0; i < gate.length; i++) sum += gate[i] * x[i];
      const share = hasPredecessor ? this.weight("smear.amount")[0] * sigmoid(sum) : 0;
      this.branch.set(x);
      for (let i = 0; i < x.length; i++) x[i] += share * previous[i];
      previous.set(this.branch);
    }
    norm(x, x);
    if (plan.smear === "fixed") {
      const gate = this.weight("smear.gate");
      this.branch.set(x);
      if (hasPredecessor) for (let i = 0; i < x.length; i++) x[i] += sigmoid(gate[i]) * (previous[i] - x[i]);
      previous.set(this.branch);
    }
  }

  /** Add the hashed pair, and triple, that end at `token` to x. @param {number} token */
  addNgrams(token) {
    const { plan, x, branch, recent } = this;
    const table = this.weight("bigram.embed.weight");
    const last = plan.ngramRows - 1;
    const width = table.length / plan.ngramRows;
    const row = new Float32Array(width);
    let mixed = token * MULTIPLIERS[0];
    let isComplete = token !== plan.bos;
    for (let n = 2; n <= (plan.trigram ? 3 : 2); n++) {
      // an n-gram does not reach across the beginning of a document
      if (n === 3) isComplete = isComplete && recent[0] !== plan.bos;
      mixed = (mixed ^ (recent[n - 2] * MULTIPLIERS[n - 1])) >>> 0;
      const start = (isComplete && this.position >= n - 1 ? mixed % last : last) * width;
      for (let i = 0; i < width; i++) row[i] += table[start + i];
    }
    multiply(branch, this.weight("bigram.proj.weight"), row);
    const scale = this.weight("bigram.scale")[0];
    for (let i = 0; i < x.length; i++) x[i] += scale * branch[i];
  }

  /** Write cos and sin of the angles of this position; those of later ones need the precision of float64. */
  setAngles() {
    const { position, frequencies, plan } = this;
    for (let i = 0; i < frequencies.length; i++) {
      const angle = position * frequencies[i];
      this.cos[i] = Math.cos(position < plan.context ? Math.fround(angle) : angle);
      this.sin[i] = Math.sin(position < plan.context ? Math.fround(angle) : angle);
    }
  }

  /** @param {number} skip @param {Float32Array} output */
  addSkip(skip, output) {
    const { x, plan } = this;
    const start = skip * x.length;
    const weight = this.weight("skip_weights");
    const gates = plan.skipGates ? this.weight("skip_gates") : null;
    for (let i = 0; i < x.length; i++) {
      const term = weight[start + i] * output[i];
      x[i] = gates ? term + sigmoid(gates[start + i]) * (x[i] - term) : x[i] + term;
    }
  }

  /** @param {number} run @param {number} index @param {number} token */
  runLayer(run, index, token) {
    const { x, x0, normed, input, branch } = this;
    const layer = this.layers[index];
    const { isJoint, inputScale } = this.plan.layers[index];
    for (let i = 0; i < x.length; i++) input[i] = layer.mix[i] * x[i] + layer.mix[x.length + i] * x0[i];
    norm(normed, input, inputScale);
    this.attend(run, index, token);
    for (let i = 0; i < x.length; i++) x[i] = input[i] + layer.attentionScale[i] * branch[i];
    norm(normed, isJoint ? input : x, inputScale);
    this.transform(layer);
    for (let i = 0; i < x.length; i++) x[i] += layer.mlpScale[i] * branch[i];
  }

  /** Run a layer whose attention reads the first stream and whose MLP reads the second. */
  runStreams(/** @type {number} */ run, /** @type {number} */ index, /** @type {number} */ token) {
    const { x, x0, second, normed, input, branch, attended } = this;
    const layer = this.layers[index];
    const { inputScale } = this.plan.layers[index];
    for (let i = 0; i < x.length; i++) input[i] = layer.mix[i] * x[i] + layer.mix[x.length + i] * x0[i];
    norm(normed, input, inputScale);
    this.attend(run, index, token);
    for (let i = 0; i < x.length; i++) attended[i] = layer.attentionScale[i] * branch[i];
    norm(normed, second, inputScale);
    this.transform(layer);
    const keeps = this.weight("lane_keeps").subarray(2 * index);
    const writes = this.weight("lane_writes").subarray(4 * index);
    for (let i = 0; i < x.length; i++) {
      const transformed = layer.mlpScale[i] * branch[i];
      x[i] = keeps[0] * x[i] + writes[0] * attended[i] + writes[2] * transformed;
      second[i] = keeps[1] * second[i] + writes[1] * attended[i] + writes[3] * transformed;
    }
  }

  /** Write the output of attention to `normed` into `branch`. */
  attend(/** @type {number} */ run, /** @type {number} */ index, /** @type {number} */ token) {
    const { plan, position, normed, query, key, value, firstValues, shares, branch } = this;
    const { heads, kvHeads, headDim, context } = plan;
    const layer = this.layers[index];
    const { window, isExclusive, valueEmbedding } = plan.layers[index];
    multiply(query, layer.query, normed);
    multiply(key, layer.key, normed);
    multiply(value, layer.value, normed);
    if (valueEmbedding !== null) this.addValueEmbedding(valueEmbedding, token);
    if (run === 0) firstValues.set(value);
    else if (layer.valueMix) {
      const [first, own] = layer.valueMix;
      for (let i = 0; i < value.length; i++) value[i] = first * firstValues[i] + own * value[i];
    }
    for (let head = 0; head < heads; head++) this.rotateHead(query, head * headDim, layer.gain[head]);
    for (let head = 0; head < kvHeads; head++) this.rotateHead(key, head * headDim, 1);
    const keys = this.keys[run];
    const values = this.values[run];
    const kvDim = key.length;
    const slot = position % context;
    keys.set(key, slot * kvDim);
    values.set(value, slot * kvDim);
    const begin = Math.max(this.documentStart, position + 1 - (window || context), position + 1 - context, 0);
    const scale = 1 / Math.sqrt(headDim);
    for (let head = 0; head < heads; head++) {
      const from = head * headDim;
      const kvFrom = Math.floor((head * kvHeads) / heads) * headDim;
      let largest = -Infinity;
      for (let past = begin; past <= position; past++) {
        const start = (past % context) * kvDim + kvFrom;
        let sum = 0;
        for (let i = 0; i < headDim; i++) sum += query[from + i] * keys[start + i];
        shares[past - begin] = sum * scale;
        largest = Math.max(largest, shares[past - begin]);
      }
      let total = 0;
      for (let past = 0; past <= position - begin; past++) total += shares[past] = Math.exp(shares[past] - largest);
      const out = this.attended.subarray(from, from + headDim);
      out.fill(0);
      for (let past = begin; past <= position; past++) {
        const start = (past % context) * kvDim + kvFrom;
        const share = shares[past - begin] / total;
        for (let i = 0; i < headDim; i++) out[i] += share * values[start + i];
      }
      if (isExclusive) removeAlong(out, value.subarray(kvFrom, kvFrom + headDim));
      if (layer.headGate) {
        const factor = this.gateOf(head, layer.headGate);
        for (let i = 0; i < headDim; i++) out[i] *= factor;
      }
    }
    multiply(branch, layer.out, this.attended);
  }

  /** Normalize a head of `vector`, rotate it by the angles of this position, and multiply it by `gain`. */
  rotateHead(/** @type {Float32Array} */ vector, /** @type {number} */ start, /** @type {number} */ gain) {
    const { cos, sin, plan } = this;
    norm(vector, vector, 1, start, plan.headDim);
    const half = plan.rotaryDims / 2;
    for (let i = start, j = 0; j < half; i++, j++) {
      const a = vector[i];
      const b = vector[i + half];
      vector[i] = a * cos[j] + b * sin[j];
      vector[i + half] = b * cos[j] - a * sin[j];
    }
    if (gain !== 1) for (let i = start; i < start + plan.headDim; i++) vector[i] *= gain;
  }

  /** @param {number} index of the layer among those with value embeddings @param {number} token */
  addValueEmbedding(index, token) {
    const table = this.weight("value_embed.embed.weight");
    const width = table.length / this.plan.vocabulary;
    const term = new Float32Array(this.value.length);
    multiply(term, this.weight("value_embed.proj.weight"), table.subarray(token * width, (token + 1) * width));
    const scale = this.weight("value_embed.scale")[0] * this.weight("value_embed.layer_scales")[index];
    for (let i = 0; i < term.length; i++) this.value[i] += scale * term[i];
  }

  /** Return the factor of a head's output. @param {number} head @param {Float32Array} weight */
  gateOf(head, weight) {
    const { gate, gateScale, heads } = this.plan;
    const inputs = weight.length / heads;
    let sum = 0;
    for (let i = 0; i < inputs; i++) sum += weight[head * inputs + i] * this.normed[i];
    return gate === "output" ? 2 * sigmoid(sum) : sigmoid(gate === "sparse" ? gateScale * sum : sum);
  }

  /** Write the output of a layer's MLP to `normed` into `branch`. @param {ReturnType<Model["layer"]>} layer */
  transform(layer) {
    const { hidden, gate, normed, branch, plan } = this;
    multiply(hidden, layer.up, normed);
    if (layer.upGate) {
      multiply(gate, layer.upGate, normed);
      for (let i = 0; i < hidden.length; i++) hidden[i] *= gate[i] * sigmoid(gate[i]);
    } else {
      const slope = plan.activation === "leaky_relu2" ? plan.leakySlope : 0;
      for (let i = 0; i < hidden.length; i++) {
        const value = hidden[i] > 0 ? hidden[i] : slope * hidden[i];
        hidden[i] = value * value;
      }
    }
    multiply(branch, layer.down, hidden);
  }

  /** Return the capped logits of x. */
  head() {
    const { plan, x, logits, narrow } = this;
    if (!plan.isTied) multiply(logits, this.weight("lm_head.weight"), x);
    else if (plan.isFactored) {
      const projection = this.weight("embed_proj.weight");
      narrow.fill(0);
      for (let row = 0; row < x.length; row++) {
        for (let i = 0; i < narrow.length; i++) narrow[i] += x[row] * projection[row * narrow.length + i];
      }
      multiply(logits, this.weight("tok_emb.weight"), narrow);
    } else multiply(logits, this.weight("tok_emb.weight"), x);
    const caps = plan.softcap === "asymmetric" ? this.weight("softcaps") : [plan.cap, plan.cap];
    for (let i = 0; i < logits.length; i++) {
      const cap = logits[i] > 0 ? caps[0] : caps[1];
      logits[i] = plan.softcap === "poly" ? polynomialCap(logits[i], cap) : cap * Math.tanh(logits[i] / cap);
    }
    return logits;
  }
}

/** @param {number} logit @param {number} cap */
function polynomialCap(logit, cap) {
  const u = Math.min(2, Math.max(-2, logit / cap));
  const square = u * u;
  return cap * Math.min(1, Math.max(-1, u * (1 - square / 3 + (square * square) / 15)));
}

/** Remove the component of `out` along `value`. @param {Float32Array} out @param {Float32Array} value */
function removeAlong(out, value) {
  let squares = 0;
  let product = 0;
  for (let i = 0; i < value.length; i++) {
    squares += value[i] * value[i];
    product += out[i] * value[i];
  }
  const length = Math.max(Math.sqrt(squares), 1e-6);
  const along = product / length / length;
  for (let i = 0; i < value.length; i++) out[i] -= along * value[i];
}

/**
 * Draw a token from logits; temperature 0 takes the most likely one.
 * @param {Float32Array} logits
 * @param {number} count tokens below this id alone are drawn
 * @param {number} temperature
 * @param {() => number} random uniform in [0, 1)
 */
export function draw(logits, count, temperature, random = Math.random) {
  let best = 0;
  for (let token = 1; token < count; token++) if (logits[token] > logits[best]) best = token;
  if (temperature === 0) return best;
  let total = 0;
  const shares = new Float64Array(count);
  for (let token = 0; token < count; token++) {
    total += shares[token] = Math.exp((logits[token] - logits[best]) / temperature);
  }
  let rest = random() * total;
  for (let token = 0; token < count; token++) {
    rest -= shares[token];
    if (rest < 0) return token;
  }
  return best;
}
