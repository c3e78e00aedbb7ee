// State files, as in lmlong/inference/state_file.py: safetensors, with the state of a text and the model that read it.

const FORMAT = 3;
export const RECENT = 1024; // tokens that a state keeps
const ALWAYS_DENSE = 4096; // values, as in lmlong/inference/sparse.py
const SIZES = { I64: 8, F32: 4, I32: 4, BF16: 2, I16: 2, BOOL: 1 }; // bytes, in the order of a file
const OWNERS = { tokenizer: "tokenizer", features: "draw of random features", model: "weights" };
const [PLACES, ROWS] = [".sparse_places", ".sparse_rows"];

const encode = (text) => new TextEncoder().encode(text);
const bytesOf = (numbers) => new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength);
const integers = (numbers) => bytesOf(BigInt64Array.from(numbers, BigInt));
const count = (shape) => shape.reduce((product, size) => product * size, 1);

/** JSON as Python writes it, with all but ASCII escaped. */
function pythonJson(values) {
  const escaped = (text) => text.replace(/[^ -~]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const json = (value) => escaped(JSON.stringify(value));
  return `{${Object.entries(values).map(([key, value]) => `${json(key)}: ${json(value)}`).join(", ")}}`;
}

async function digest(about, tensors) {
  const hashed = await crypto.subtle.digest("SHA-256", joined([encode(pythonJson(about)), serialized(tensors)]));
  return Array.from(new Uint8Array(hashed), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let end = 0;
  for (const part of parts) {
    whole.set(part, end);
    end += part.length;
  }
  return whole;
}

/** A file of tensors: {name: {dtype, shape, data}}. */
function serialized(tensors, metadata) {
  const rank = Object.keys(SIZES);
  const order = ([one, a], [other, b]) => rank.indexOf(a.dtype) - rank.indexOf(b.dtype) || (one < other ? -1 : 1);
  const sorted = Object.entries(tensors).sort(order);
  const header = metadata ? { __metadata__: metadata } : {};
  let end = 0;
  for (const [name, { dtype, shape, data }] of sorted) {
    header[name] = { dtype, shape, data_offsets: [end, (end += data.length)] };
  }
  const json = encode(JSON.stringify(header));
  const padded = joined([json, encode(" ".repeat(-json.length & 7))]);
  return joined([integers([padded.length]), padded, ...sorted.map(([, { data }]) => data)]);
}

function parsed(file) {
  const size = Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
  const { __metadata__: metadata, ...header } = JSON.parse(new TextDecoder().decode(file.subarray(8, 8 + size)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    const data = new Uint8Array(file.subarray(8 + size + begin, 8 + size + end)); // a copy, aligned
    if (data.length !== SIZES[dtype] * count(shape)) throw new Error(name);
    tensors[name] = { dtype, shape, data };
  }
  return { about: JSON.parse(metadata.lmlong), tensors };
}

/** A tensor of a state, or if it mostly equals that of an empty state, the rows that differ. */
function packed({ name, dtype, shape, fill }, bytes) {
  const width = SIZES[dtype] * (shape.length === 4 ? shape[3] : 1);
  const whole = { [name]: { dtype, shape, data: bytes.slice() } };
  const rows = bytes.length / width;
  if (count(shape) <= ALWAYS_DENSE) return whole;
  const differs = (row) => bytes.subarray(row * width, (row + 1) * width).some((byte) => byte !== fill);
  const places = Array.from({ length: rows }, (_, row) => row).filter(differs);
  if (2 * places.length >= rows) return whole;
  const data = joined(places.map((row) => bytes.subarray(row * width, (row + 1) * width)));
  return {
    [name + PLACES]: { dtype: "I64", shape: [places.length], data: integers(places) },
    [name + ROWS]: { dtype, shape: [places.length, width / SIZES[dtype]], data },
  };
}

/** The bytes of a file with the state of a text. */
export async function saved({ engine, recent, total }, { run, owners }, tail) {
  if (!engine.image.state) throw new Error("The state of this model grows with its text. Keep the text instead.");
  const tensors = Object.assign({}, ...engine.image.state.map((tensor) => packed(tensor, engine.tensor(tensor))));
  const add = (name, numbers, shape) => (tensors[name] = { dtype: "I64", shape, data: integers(numbers) });
  add("state.position", engine.position, [1]);
  if (engine.image.keepsTokens) add("state.last_tokens", engine.lastTokens, [1, engine.lastTokens.length]);
  add("last", recent.slice(-1), [1]);
  add("recent", [...Array(RECENT - recent.length).fill(-1), ...recent], [1, RECENT]);
  add("total", [total], [1]);
  add("unread.chosen", [], [1, 0]);
  for (const name of ["unread.before", "unread.pending"]) tensors[name] = { dtype: "I16", shape: [1, 0], data: new Uint8Array() };
  const about = { format: FORMAT, run, tokens: total, tail, ...owners };
  return serialized(tensors, { lmlong: pythonJson({ ...about, sha256: await digest(about, tensors) }) });
}

/** Continue the state in a file. Return the end of its text: {recent, total, unread}. */
export async function restored(file, engine, { owners }) {
  const { about: { sha256, ...about }, tensors } = parsed(file);
  if (about.format !== FORMAT) throw new Error(`This file has format ${about.format}, not ${FORMAT}.`);
  for (const [key, meaning] of Object.entries(OWNERS)) {
    if (about[key] !== owners[key]) throw new Error(`This state was made with another ${meaning}. Use it with ${about.run}.`);
  }
  if (sha256 !== (await digest(about, tensors))) throw new Error("This file is damaged: its sha256 differs.");
  const numbers = (name) => Array.from(new BigInt64Array(tensors[name].data.buffer));
  const recent = numbers("recent").map(Number).filter((token) => token >= 0);
  const writes = engine.image.state.map((tensor) => writeOf(tensor, tensors));
  if (recent.some((token) => token >= engine.image.vocabulary)) throw new Error("A token in this file is not one of this model.");
  engine.reset();
  engine.image.state.forEach((tensor, at) => writes[at](engine.tensor(tensor)));
  engine.position.set(numbers("state.position"));
  if (engine.image.keepsTokens) engine.lastTokens.set(numbers("state.last_tokens"));
  const unread = Array.from(new Int16Array(tensors["unread.pending"].data.buffer)).filter(Boolean);
  const pending = new TextDecoder().decode(Uint8Array.from(unread, (byte) => byte - 1));
  return { recent, total: Number(numbers("total")[0]), pending };
}

/** A function that writes a tensor of a file to the memory of an empty one. */
function writeOf({ name, dtype, shape, size }, tensors) {
  const [whole, places, rows] = [name, name + PLACES, name + ROWS].map((each) => tensors[each]);
  const width = rows && rows.data.length / rows.shape[0];
  const at = places ? Array.from(new BigInt64Array(places.data.buffer), Number) : [];
  const fits = whole ? `${whole.shape}` === `${shape}` : at.every((row) => row >= 0 && (row + 1) * width <= size);
  if ((whole ?? rows)?.dtype !== dtype || !fits) throw new Error(`${name} is not a tensor of this model's state.`);
  if (whole) return (bytes) => bytes.set(whole.data);
  return (bytes) => at.forEach((row, number) => bytes.set(rows.data.subarray(number * width, (number + 1) * width), row * width));
}
