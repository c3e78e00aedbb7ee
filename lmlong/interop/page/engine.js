// The decode engine: a model and the state of one text, in the memory of a WebAssembly module.

function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

export class Engine {
  /**
   * @param image   where what is in the memory (lmlong/decode/image.py)
   * @param wasm    the decode step, in base64
   * @param pieces  the data of the image, in base64
   */
  static async load(image, wasm, pieces) {
    const { instance } = await WebAssembly.instantiate(fromBase64(wasm));
    return new Engine(image, instance.exports, pieces);
  }

  constructor(image, functions, pieces) {
    Object.assign(this, { image, functions, base: functions.allocate(image.size) });
    if (!this.base) throw new RangeError("There is not enough memory for this model.");
    let end = this.base;
    for (const piece of pieces) {
      const bytes = fromBase64(piece);
      this.bytes(end, bytes.length).set(bytes);
      end += bytes.length;
    }
    this.job = this.base + image.job;
    for (const at of image.pointers) this.view.setUint32(this.base + at, this.#pointer(this.base + at) + this.base, true);
    this.reset();
  }

  /** Begin a new text. */
  reset() {
    for (const [offset, size, byte] of this.image.fills) this.bytes(this.base + offset, size).fill(byte);
    for (const field of ["states_before", "states_after"]) {
      const row = this.#field(field);
      for (const [offset, value] of this.image.numbers) this.view.setBigInt64(row + offset, BigInt(value), true);
    }
  }

  /** Read a token, and stay where the text is. Return the logits of the next, which the next call changes. */
  read(token) {
    if (!this.functions.read_token(this.job, token)) throw new RangeError("There is not enough memory for a longer text.");
    return this.#array(Float32Array, "logits", this.image.vocabulary);
  }

  /** Move on to the state after the token that was read. */
  advance() {
    this.functions.advance(this.job);
  }

  get position() {
    return this.#array(BigInt64Array, "positions", 1);
  }

  get lastTokens() {
    return this.#array(BigInt64Array, "last_tokens", this.image.pastTokens);
  }

  /** The bytes of a tensor of the state (image.state). */
  tensor({ slot, size }) {
    return this.bytes(this.#pointer(this.#field("states_before") + slot), size);
  }

  bytes(address, size) {
    return new Uint8Array(this.functions.memory.buffer, address, size);
  }

  get view() {
    return new DataView(this.functions.memory.buffer);
  }

  #pointer(address) {
    return this.view.getUint32(address, true);
  }

  #field(name) {
    return this.#pointer(this.job + this.image.fields[name]);
  }

  #array(type, field, size) {
    return new type(this.functions.memory.buffer, this.#field(field), size);
  }
}
