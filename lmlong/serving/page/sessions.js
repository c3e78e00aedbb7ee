// The server's sessions and their texts, as far as this page has asked for them.

import { askJson } from "./api.js";
import { Aligner } from "./tokens.js";

const ALTERNATIVES = 5;

/** Sessions by id. One that is being written is `pending`. */
export const sessions = new Map();

/** Promises of passages by the id of the session that added them: {by, text, tokens}; the model's have tokens. */
const texts = new Map();

/** Ask for the list of sessions. */
export async function load() {
  const listed = [];
  for (let after = ""; after !== null; ) {
    const page = await askJson(`v1/sessions${after && `?after=${encodeURIComponent(after)}`}`);
    listed.push(...page.data);
    after = page.next;
  }
  const pending = [...sessions.values()].filter((session) => session.pending);
  const isChanged = ({ id, tokens }) => sessions.get(id)?.tokens !== tokens; // by another client
  for (const session of listed.filter(isChanged)) texts.delete(session.id);
  sessions.clear();
  for (const session of [...listed, ...pending]) sessions.set(session.id, session);
}

/** The passages that a session adds to its parent's text. */
export function passagesOf(id) {
  if (!texts.has(id)) {
    const asked = askJson(`v1/sessions/${id}/text?logprobs=${ALTERNATIVES}`).then(aligned);
    asked.catch(() => texts.delete(id));
    texts.set(id, asked);
  }
  return texts.get(id);
}

function aligned({ passages }) {
  const tokensOf = (passage) => (passage.logprobs ? new Aligner().add(passage) : null);
  return passages.map((passage) => ({ by: passage.by, text: passage.text, tokens: tokensOf(passage) }));
}

/** Add a session whose text is known. */
export function add(session, passages) {
  sessions.set(session.id, session);
  texts.set(session.id, Promise.resolve(passages));
}

export function remove(id) {
  sessions.delete(id);
  texts.delete(id);
}

export function textOf(passages) {
  const parts = passages.flatMap((passage) => passage.tokens ?? passage);
  return parts.map(({ text }) => text).join("");
}

/** The id of the session before another, if it is still there. */
export const parentOf = ({ parent }) => (sessions.has(parent) ? parent : null);

/** The sessions from the first to this one. */
export function pathTo(id) {
  const path = [];
  for (let session = sessions.get(id); session; session = sessions.get(session.parent)) path.unshift(session);
  return path;
}

/** The ids of the sessions that follow each, the oldest first; of null those that follow none. */
export function children() {
  return Map.groupBy(sessions.keys(), (id) => parentOf(sessions.get(id)));
}

/** The ids of a session and of all that follow it, the last first. */
export function subtree(id) {
  const following = children();
  const ids = [id];
  for (const each of ids) ids.push(...(following.get(each) ?? []));
  return ids.reverse();
}
