// Requests to the server of this page, which are repeated while it is away or busy, or after it gets a key.

import { read, store } from "./storage.js";

const PAUSES = [0.5, 1, 2, 4, 8, 15, 30]; // seconds between two checks whether the server is back
const SILENCE = 45; // seconds; a stream sends a comment every 15
const KEY = "lmlong.key";

/** The server refused a request. */
export class Refused extends Error {
  constructor(status, error = {}, seconds = 1) {
    super(error.message ?? `The server answered with status ${status}.`);
    Object.assign(this, { status, code: error.code, seconds });
  }
}

/** The server does not respond. */
export class Away extends Error {}

/** Callbacks about the condition of the server; set by main.js. */
export const page = {
  async pause(seconds) {}, // until the next check; ends early if the user asks for it
  back() {},
  async askForKey(isWrong) {}, // returns the key
};

export function jsonBody(value) {
  return { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } };
}

let key = read(KEY, "sessionStorage");

/** Ask once. */
export async function request(path, options = {}, signal) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", redirect: "error", ...options, headers, signal });
  } catch (error) {
    throw signal?.aborted ? error : new Away();
  }
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => ({}))).error;
  throw refusal(answer.status, error, Number(answer.headers.get("Retry-After")) || 1);
}

function refusal(status, error, seconds) {
  const isAway = error?.code === "shutting_down" || (!error && [502, 503, 504].includes(status)); // a proxy's words
  return isAway ? new Away() : new Refused(status, error, seconds);
}

/** Repeat a request until its result is final. */
export async function ask(path, options, signal) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await request(path, options, signal);
    } catch (error) {
      await patience(error, attempt, signal);
    }
  }
}

/** Wait until an error may have passed; throw it if waiting does not help. */
export async function patience(error, attempt, signal) {
  if (error instanceof Away) return unless(signal, whenBack());
  if (error.status === 401) return unless(signal, newKey());
  const isBusy = error.code === "rate_limit_exceeded" || (error.code === "session_in_use" && attempt < 10);
  if (!isBusy) throw error;
  return unless(signal, sleep(Math.max(error.seconds, Math.min(2 ** attempt / 4, 8))));
}

let returning = null;

/** Wait until the server is back; all callers share one check. */
export function whenBack() {
  returning ??= lookUntilBack().finally(() => (returning = null));
  return returning;
}

async function lookUntilBack() {
  for (let look = 0; ; look++) {
    await page.pause(PAUSES[Math.min(look, PAUSES.length - 1)]);
    if (await isThere()) return page.back();
  }
}

export async function isThere() {
  try {
    return (await fetch("ready", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

let asking = null;

function newKey() {
  asking ??= page
    .askForKey(key !== null)
    .then((given) => {
      key = given;
      store(KEY, JSON.stringify(given), "sessionStorage");
    })
    .finally(() => (asking = null));
  return asking;
}

export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

function unless(signal, promise) {
  if (!signal) return promise;
  const aborted = new Promise((_, reject) => {
    const end = () => reject(signal.reason);
    if (signal.aborted) end();
    signal.addEventListener("abort", end, { once: true });
  });
  return Promise.race([promise, aborted]);
}

/** Iterate over the events of a stream as they arrive. */
export const stream = (path, body, signal) => events(path, jsonBody({ ...body, stream: true }), signal);

/** Iterate over the events of an answer, or the one value that it is. */
export async function* events(path, options, signal) {
  const answer = await request(path, options, signal);
  if (!answer.headers.get("Content-Type")?.startsWith("text/event-stream")) return yield await answer.json();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await nextPart(reader, signal);
    if (done) throw new Away(); // a complete stream ends with [DONE]
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue; // a comment
      const found = JSON.parse(event.slice(6));
      if (found.error) throw refusal(500, found.error);
      yield found;
    }
  }
}

async function nextPart(reader, signal) {
  let timer;
  const silence = new Promise((resolve) => (timer = setTimeout(resolve, 1000 * SILENCE, { done: true })));
  try {
    const part = await Promise.race([reader.read(), silence]);
    if (part.done) reader.cancel().catch(() => {});
    return part;
  } catch (error) {
    throw signal?.aborted ? error : new Away();
  } finally {
    clearTimeout(timer);
  }
}
