// From logits to the next token, as in lmlong/inference/sampling.py and lmlong/model/loop_guard.py.

const LOOP_PENALTY = 2;
const [BASE, SHORTEST, STEEPEST, LARGEST] = [3, 2, 20, 1e4];
const [UNIT, SPAN, OFTEN] = [4, 256, 8];
const [WINDOW, MEMORY] = [1024, 2100]; // tokens

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

  constructor(penalty) {
    this.penalty = penalty;
  }

  append(token) {
    this.#tokens.push(token);
    if (this.#tokens.length > 2 * MEMORY) this.#tokens = this.#tokens.slice(-MEMORY);
  }

  /** A map from tokens to what their logits are lowered by. */
  penalties() {
    const tokens = this.#tokens;
    const end = tokens.length - 1;
    const [lowered, often] = [new Map(), new Map()];
    const lower = (token, penalty) => lowered.set(token, Math.min(LARGEST, Math.max(penalty, lowered.get(token) ?? 0)));
    for (let index = Math.max(0, end - WINDOW); index < end; index++) {
      const most = Math.max(end - index, SHORTEST) + STEEPEST;
      let repeated = 0; // how many of the last tokens equal those up to the index
      while (repeated < most && tokens[index - repeated] === tokens[end - repeated]) repeated++;
      if (repeated < SHORTEST) continue;
      const [next, beyond] = [tokens[index + 1], repeated - Math.max(end - index, SHORTEST)];
      if (beyond >= 0) lower(next, this.penalty * BASE ** beyond);
      if (repeated >= UNIT - 1 && end - index <= SPAN) often.set(next, (often.get(next) ?? 0) + 1);
    }
    for (const [token, count] of often) if (count >= OFTEN) lower(token, this.penalty * (count - OFTEN + 1));
    return lowered;
  }
}
