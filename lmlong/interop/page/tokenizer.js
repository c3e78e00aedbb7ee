// Tokenizers: byte-level BPE, and the pieces of characters of sentencepiece. A piece is a string with one character for
// each of its bytes.

const encoder = new TextEncoder();
const PART = 8192; // characters, as in lmlong/data/tokenizers/base.py

/** The bytes of one character in UTF-8; half of a surrogate pair has three of its own. */
function pieceOf(character) {
  const code = character.codePointAt(0);
  const isHalf = code >= 0xd800 && code <= 0xdfff;
  const half = [0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)];
  return String.fromCharCode(...(isHalf ? half : encoder.encode(character)));
}

/** Numbers, of which the smallest is taken first. */
class Heap {
  #numbers = [];

  push(number) {
    const numbers = this.#numbers;
    let at = numbers.length;
    for (let above; at && numbers[(above = (at - 1) >> 1)] > number; at = above) numbers[at] = numbers[above];
    numbers[at] = number;
  }

  pop() {
    const numbers = this.#numbers;
    const [smallest, last] = [numbers[0], numbers.pop()];
    if (!numbers.length) return smallest;
    let at = 0;
    for (let below; (below = 2 * at + 1) < numbers.length; at = below) {
      if (numbers[below + 1] < numbers[below]) below++;
      if (numbers[below] >= last) break;
      numbers[at] = numbers[below];
    }
    numbers[at] = last;
    return smallest;
  }
}

export class Tokenizer {
  /** @param spec  see lmlong/interop/page/tokenizer.py */
  constructor(spec) {
    Object.assign(this, spec);
    const { table, pieces, merges, patterns, unsafe, added } = spec;
    this.ids = new Map(pieces.map((token) => [table[token], token]));
    this.ranks = new Map(merges.map((tokens, rank) => [this.#key(...tokens.map((token) => table[token])), rank]));
    this.patterns = patterns.map((pattern) => new RegExp(pattern, "gu"));
    this.unsafe = new RegExp(unsafe, "u");
    this.added = new RegExp(added, "u");
  }

  encode(text) {
    const byBytes = (run) => this.#byBytes([...run].map(pieceOf).join(""));
    return partsOf(text).flatMap((part) => alternately(part, this.unsafe, (run) => this.#encodeSafe(run), byBytes));
  }

  /** A function that returns the text that a token completes; without a token, the end of the text. */
  decoder() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return (token) => {
      const piece = token === undefined ? "" : this.table[token];
      return decoder.decode(Uint8Array.from(piece, (byte) => byte.charCodeAt(0)), { stream: token !== undefined });
    };
  }

  #encodeSafe(text) {
    const merged = (run) => this.#words(run).flatMap((word) => this.#merge(word));
    return alternately(text, this.added, merged, (run) => [this.addedIds[run]]);
  }

  #words(text) {
    return this.patterns.reduce((words, pattern) => words.flatMap((word) => isolated(word, pattern)), [text]);
  }

  #key(left, right) {
    return this.byResult ? left + (right ?? "") : `${left.length}:${left}${right}`;
  }

  #byBytes(piece) {
    return Array.from(piece, (byte) => this.bytes[byte.charCodeAt(0)]);
  }

  /** Merge neighbouring pieces: first those of the lowest rank, of these the leftmost. */
  #merge(word) {
    const characters = Array.from(word, pieceOf);
    const parts = this.ofBytes ? [...characters.join("")] : characters;
    const whole = parts.join("");
    if (this.ignoreMerges && this.ids.has(whole)) return [this.ids.get(whole)];
    const next = parts.map((_, at) => at + 1);
    const before = parts.map((_, at) => at - 1);
    const heap = new Heap();
    const rank = (at) => (next[at] < parts.length ? this.ranks.get(this.#key(parts[at], parts[next[at]])) : undefined);
    const offer = (at) => {
      const found = at < 0 ? undefined : rank(at);
      if (found !== undefined) heap.push(found * 2 ** 32 + at);
    };
    parts.forEach((_, at) => offer(at));
    for (let top; (top = heap.pop()) !== undefined; ) {
      const at = top % 2 ** 32;
      if (parts[at] === null || rank(at) !== (top - at) / 2 ** 32) continue;
      const merged = next[at];
      parts[at] += parts[merged];
      parts[merged] = null;
      next[at] = next[merged];
      if (next[at] < parts.length) before[next[at]] = at;
      offer(before[at]);
      offer(at);
    }
    return parts.filter((part) => part !== null).flatMap((part) => this.ids.get(part) ?? this.#byBytes(part));
  }
}

/** The tokens of a text that a pattern with one group cuts: those of what is between matches, and those of matches. */
function alternately(text, pattern, between, matched) {
  return text.split(pattern).flatMap((run, number) => (run ? (number % 2 ? matched : between)(run) : []));
}

/** The matches of a pattern in a word, and what is between them. */
function isolated(word, pattern) {
  const found = [];
  let end = 0;
  for (const { 0: match, index } of word.matchAll(pattern)) {
    if (!match) continue;
    found.push(word.slice(end, index), match);
    end = index + match.length;
  }
  return [...found, word.slice(end)].filter(Boolean);
}

/** Cut a text into parts that are encoded separately. */
function partsOf(text) {
  const characters = Array.from(text);
  const parts = [];
  for (let start = 0; start < characters.length; ) {
    const newline = characters.slice(start, start + 2 * PART).indexOf("\n", PART);
    const end = newline >= 0 ? start + newline : start + 2 * PART;
    parts.push(characters.slice(start, end).join(""));
    start = end;
  }
  return parts;
}
