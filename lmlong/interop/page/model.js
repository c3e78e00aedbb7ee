// A model that continues and scores texts: `load`, `generate`, `score`.

import { Engine } from "./engine.js";
import { Sampler, surprisal } from "./sampling.js";
import { RECENT, restored, saved } from "./state.js";
import { Tokenizer } from "./tokenizer.js";

const TAIL = 200; // characters that a state file shows

/** The model in the HTML of a page that `lmlong export --to html` has written. */
export async function load(html) {
  const parts = (name) => Array.from(html.matchAll(new RegExp(`<script type="text/plain" class="${name}">([^<]*)`, "g")), (part) => part[1]);
  return Model.load(JSON.parse(parts("about")[0]), parts("wasm")[0], parts("weights"));
}

export class Model {
  static async load(about, wasm, weights) {
    return new Model(about, await Engine.load(about.image, wasm, weights));
  }

  constructor(about, engine) {
    Object.assign(this, { about, engine, tokenizer: new Tokenizer(about.tokenizer) });
    this.reset();
  }

  /** Begin a new text. */
  reset() {
    this.engine.reset();
    Object.assign(this, { recent: [this.about.tokenizer.bos], total: 1, pending: "" });
  }

  /** Read the last token, and return the logits of the next. */
  #step() {
    return this.engine.read(this.recent.at(-1));
  }

  #append(token) {
    this.engine.advance();
    this.recent.push(token);
    if (this.recent.length > RECENT) this.recent.shift();
    this.total++;
  }

  /** Read more of the text, token by token: {text, nats}, where `nats` is -log p of the token. */
  *read(text) {
    const decode = this.tokenizer.decoder();
    const tokens = this.tokenizer.encode(this.pending + text);
    this.pending = "";
    for (const token of tokens) {
      const nats = surprisal(this.#step(), token);
      this.#append(token);
      yield { text: decode(token), nats };
    }
  }

  /** Continue the text: {text, nats} of each token, up to the end of the document or `maxTokens`. */
  *write({ maxTokens = 200, ...options } = {}) {
    const [sampler, decode] = [new Sampler(options), this.tokenizer.decoder()];
    for (let written = 0; written < maxTokens; written++) {
      const logits = this.#step();
      const token = sampler.sample(logits);
      if (token === this.about.tokenizer.eos) return;
      const nats = surprisal(logits, token);
      this.#append(token);
      yield { text: decode(token), nats };
    }
  }

  /** Yield the continuation of a prompt, piece by piece. Options: maxTokens, temperature, loopPenalty, seed. */
  *generate(prompt, options) {
    this.reset();
    for (const _ of this.read(prompt));
    for (const { text } of this.write(options)) yield text;
  }

  /** The tokens of a text, and its bits per byte. */
  score(text) {
    this.reset();
    const tokens = [...this.read(text)];
    const nats = tokens.reduce((sum, token) => sum + token.nats, 0);
    return { tokens, bitsPerByte: nats / Math.LN2 / new TextEncoder().encode(text).length };
  }

  /** The last characters of the text. */
  get tail() {
    const decode = this.tokenizer.decoder();
    return [...this.recent.map(decode).join("")].slice(-TAIL).join("");
  }

  /** A state file, from which `restore` and `lmlong generate --state` continue the text. */
  save() {
    return saved(this, this.about, this.tail);
  }

  async restore(file) {
    Object.assign(this, await restored(file, this.engine, this.about));
  }
}
