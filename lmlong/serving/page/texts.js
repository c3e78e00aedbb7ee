// The texts of sessions, stored in this browser, because the server stores only their ends.

import { read, store } from "./storage.js";

const TEXT = "lmlong.text.";
const INDEX = "lmlong.texts"; // {id: [when it was used last, characters]}
const MOST = 3_000_000; // characters of all texts; browsers give about five million
const SHOWN = 20_000; // characters of a file that are kept

const held = new Map();

/** @returns {segments, given, ended, name, cut} or undefined */
export function get(id) {
  if (!held.has(id)) {
    const data = read(TEXT + id);
    if (data === null) return undefined;
    held.set(id, data);
  }
  return held.get(id);
}

export function keep(id, entry) {
  held.set(id, entry);
  const data = JSON.stringify(entry, (name, value) => (typeof value === "number" ? +value.toFixed(3) : value));
  const index = read(INDEX) ?? {};
  index[id] = [Date.now(), data.length];
  makeRoom(index, MOST, id);
  while (!store(TEXT + id, data) || !store(INDEX, JSON.stringify(index))) {
    const size = total(index);
    makeRoom(index, size - 1, id);
    if (total(index) === size) return; // there is no room at all: this tab alone knows it
  }
}

export function remove(id) {
  held.delete(id);
  const index = read(INDEX) ?? {};
  delete index[id];
  store(TEXT + id, null);
  store(INDEX, JSON.stringify(index));
}

/** The part of a file that is stored: its end. */
export function ofFile(name, text) {
  const told = text.length > SHOWN ? text.slice(-SHOWN).replace(/^[\udc00-\udfff]/, "") : text;
  return { segments: [{ told }], given: 1, name, cut: told.length < text.length };
}

const total = (index) => Object.values(index).reduce((sum, [, size]) => sum + size, 0);

/** Delete the least recently used texts, except one. */
function makeRoom(index, most, except) {
  const oldest = Object.keys(index).sort((one, other) => index[one][0] - index[other][0]);
  for (const id of oldest) {
    if (total(index) <= most) return;
    if (id === except) continue;
    store(TEXT + id, null);
    delete index[id];
  }
}
