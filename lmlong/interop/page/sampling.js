// From logits to the next token, as in lmlong/inference/sampling.py and lmlong/model/loop_guard.py.

const LOOP_PENALTY = 2;
const [BASE, SHORTEST, LARGEST] = [3, 2, 1e4];
const [UNIT, SPAN, OFTEN] = [4, 256, 8];
const [WINDOW, MEMORY] = [1024, 4096]; // tokens

/** Numbers from 0 up to 1 that depend on a seed (mulberry32). */
function randomOf(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Draws the tokens of one text. */
export class Sampler {
  constructor({ temperature = 0.8, loopPenalty = temperature > 0 ? LOOP_PENALTY : 0, seed = 0, random = randomOf(seed) }) {
    Object.assign(this, { temperature, random, guard: loopPenalty ? new LoopGuard(loopPenalty) : null });
  }

  sample(logits) {
    const lowered = logits.slice();
    for (const [token, penalty] of this.guard?.penalties() ?? []) lowered[token] -= penalty;
    const token = this.temperature === 0 ? likeliest(lowered) : this.#draw(lowered);
    this.guard?.append(token);
    return token;
  }

  #draw(logits) {
    const most = logits[likeliest(logits)];
    const sums = new Float64Array(logits.length);
    let total = 0;
    for (let token = 0; token < logits.length; token++) {
      sums[token] = total += Math.exp((logits[token] - most) / this.temperature);
    }
    if (!Number.isFinite(total)) throw new Error("The model predicts values that are not numbers.");
    const drawn = this.random() * total;
    return sums.findIndex((sum) => sum > drawn);
  }
}

export function likeliest(logits) {
  let best = 0;
  for (let token = 1; token < logits.length; token++) if (logits[token] > logits[best]) best = token;
  return best;
}

/** -log p of a token, in nats. */
export function surprisal(logits, token) {
  const most = logits[likeliest(logits)];
  let sum = 0;
  for (let other = 0; other < logits.length; other++) sum += Math.exp(logits[other] - most);
  return Math.log(sum) + most - logits[token];
}

/** The penalties on loops for the next token of one growing text. */
class LoopGuard {
  #tokens = [];
  #ends = new Map(); // the indices at which each pair of tokens ends
  #repeated = new Map(); // how many of the last tokens equal those up to an earlier index

  constructor(penalty) {
    this.penalty = penalty;
  }

  append(token) {
    if (this.#tokens.length === MEMORY) this.#forget();
    this.#tokens.push(token);
    const end = this.#tokens.length - 1;
    if (!end) return;
    const ends = this.#ofPair(end);
    const before = this.#repeated;
    const near = ends.filter((index) => index >= end - WINDOW);
    this.#repeated = new Map(near.map((index) => [index, (before.get(index - 1) ?? 1) + 1]));
    ends.push(end);
  }

  #ofPair(end) {
    const pair = this.#tokens[end - 1] * 2 ** 32 + this.#tokens[end];
    if (!this.#ends.has(pair)) this.#ends.set(pair, []);
    return this.#ends.get(pair);
  }

  /** Forget the tokens before those that a unit may reach to. */
  #forget() {
    const begin = MEMORY - WINDOW - 1;
    this.#tokens.splice(0, begin);
    this.#ends.clear();
    for (let end = 1; end < this.#tokens.length; end++) this.#ofPair(end).push(end);
    this.#repeated = new Map([...this.#repeated].map(([index, repeated]) => [index - begin, repeated]));
  }

  /** A map from tokens to what their logits are lowered by. */
  penalties() {
    const end = this.#tokens.length - 1;
    const counts = new Map();
    const lowered = new Map();
    for (const [index, repeated] of this.#repeated) {
      const next = this.#tokens[index + 1];
      if (repeated >= UNIT - 1 && end - index <= SPAN) counts.set(next, (counts.get(next) ?? 0) + 1);
      const beyond = repeated - Math.max(end - index, SHORTEST);
      if (beyond < 0) continue;
      lowered.set(next, Math.max(this.penalty * BASE ** Math.min(beyond, 20), lowered.get(next) ?? 0));
    }
    for (const [token, count] of counts) {
      if (count < OFTEN) continue;
      lowered.set(token, Math.max(this.penalty * (count - OFTEN + 1), lowered.get(token) ?? 0));
    }
    return [...lowered].map(([token, penalty]) => [token, Math.min(penalty, LARGEST)]);
  }
}
