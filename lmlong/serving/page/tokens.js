// Tokens: the part of the text that each covers, and its surprisal.

const encoder = new TextEncoder();

/** The bytes of a token by the name that the server gives it: its text, or "bytes:\xe2\x80". */
function bytesOf(name) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return encoder.encode(name);
  return Uint8Array.from(name.slice(6).split("\\x").slice(1), (digits) => parseInt(digits, 16));
}

/** Whether a token is text: neither a part of a character nor a special token such as <eos>. */
export const isText = (name) => !/^(bytes:|<[^<>\s]+>$)/.test(name);
export const bits = (logprob) => Math.max(0, -logprob / Math.LN2);
export const percent = (share) => (share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
export const surprise = ({ logprob }) => `${bits(logprob).toFixed(1)} bits, ${percent(Math.exp(logprob))}`;

/** A token with visible spaces and line ends. */
export function visible(name) {
  return name.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "nothing";
}

/**
 * Divides the text of a stream among its tokens. The first token may begin with the end of the text before (its
 * `head`), and the tokens of one character are merged into one.
 */
export class Aligner {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #isFirst = true;
  #held = []; // tokens whose characters are not whole yet

  /** The tokens that a choice of a chunk adds: {text, logprob, others: [[name, logprob]], head}. */
  add({ text, logprobs, finish_reason: reason }) {
    const names = logprobs?.tokens ?? [];
    const tokens = [];
    names.forEach((name, number) => {
      if (reason === "stop" && number === names.length - 1) return; // the end of the document has no text
      const others = Object.entries(logprobs.top_logprobs[number]).sort((one, other) => other[1] - one[1]);
      this.#held.push({ logprob: logprobs.token_logprobs[number], others });
      const piece = this.#decoder.decode(bytesOf(name), { stream: true });
      if (piece) tokens.push(this.#join(piece));
    });
    return this.#matched(tokens, text);
  }

  #join(text) {
    const parts = this.#held.splice(0);
    const logprob = parts.reduce((sum, part) => sum + part.logprob, 0);
    return { text, logprob, others: parts.length === 1 ? parts[0].others : [] };
  }

  /** Tokens that have the text that was told, and no other. */
  #matched(tokens, text) {
    const joined = tokens.map((token) => token.text).join("");
    if (this.#isFirst && tokens.length) {
      this.#isFirst = false;
      const first = tokens[0];
      const size = joined.endsWith(text) ? joined.length - text.length : 0;
      if (size && size <= first.text.length) {
        first.head = first.text.slice(0, size);
        first.text = first.text.slice(size);
        return tokens;
      }
    }
    if (joined === text) return tokens;
    if (tokens.length && text.startsWith(joined)) {
      tokens.at(-1).text += text.slice(joined.length); // the end of a text, where a character stayed incomplete
      return tokens;
    }
    return text ? [{ text, logprob: null, others: [] }] : []; // bytes that are no characters
  }
}
