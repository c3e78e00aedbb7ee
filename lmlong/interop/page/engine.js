// The decode engine: a model and one text in the memory of a WebAssembly module.

/** Bytes of base64, which browsers decode in pieces of any size. */
export function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export class Engine {
  /**
   * @param model   what the page says of the image: its size, fills, pointers and the job (lmlong/decode/image.py)
   * @param wasm    the bytes of the decode step
   * @param pieces  the image, as an iterable of base64
   */
  static async load(model, wasm, pieces) {
    const { instance } = await WebAssembly.instantiate(wasm, {});
    return new Engine(model, instance.exports, pieces);
  }

  constructor(model, functions, pieces) {
    Object.assign(this, { model, functions });
    functions._initialize?.();
    this.base = functions.allocate(model.size);
    if (!this.base) throw new Error("There is not enough memory for this model.");
    let end = this.base;
    for (const piece of pieces) {
      const bytes = fromBase64(piece);
      this.bytes(end, bytes.length).set(bytes);
      end += bytes.length;
    }
    this.#clear();
    const memory = this.#view();
    for (const at of model.pointers) {
      memory.setUint32(this.base + at, memory.getUint32(this.base + at, true) + this.base, true);
    }
    this.job = this.base + model.job;
    this.logits = this.#pointer("logits");
    this.first = this.bytes(this.#pointer("states_before"), model.stateSize).slice();
  }

  /** Begin a new text. */
  reset() {
    this.#clear();
  }

  /** Fill the parts of the memory whose bytes are equal. */
  #clear() {
    for (const [offset, size, byte] of this.model.fills) this.bytes(this.base + offset, size).fill(byte);
  }

  /** Read a token, and return the logits of the next, which are valid until then. */
  read(token) {
    if (!this.functions.read_token(this.job, token)) throw new Error("There is not enough memory for a longer text.");
    return new Float32Array(this.functions.memory.buffer, this.logits, this.model.vocabulary);
  }

  bytes(address, size) {
    return new Uint8Array(this.functions.memory.buffer, address, size);
  }

  #view() {
    return new DataView(this.functions.memory.buffer);
  }

  #pointer(field) {
    return this.#view().getUint32(this.job + this.model.fields[field], true);
  }
}
