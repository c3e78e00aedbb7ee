// Requests to the server, which are repeated while it is away or busy, or after it gets a key.

import { say } from "./dom.js";

const PAUSE = 2; // seconds between two checks whether the server is back
const KEY = "lmlong.key"; // in sessionStorage, which ends with the tab

/** The server refused a request. */
export class Refused extends Error {
  constructor(status, error = {}, seconds = 1) {
    super(error.message ?? `The server answered with status ${status}.`);
    Object.assign(this, { status, code: error.code, seconds });
  }
}

/** The server does not respond. */
export class Away extends Error {
  message = "The server stopped responding. Try again.";
}

export const jsonBody = (value) => ({
  method: "POST",
  body: JSON.stringify(value),
  headers: { "Content-Type": "application/json" },
});

/** Ask once. */
export async function request(path, options = {}, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", redirect: "error", ...options, headers, signal });
  } catch (error) {
    throw signal?.aborted ? error : new Away();
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw refusal(answer.status, error, Number(answer.headers.get("Retry-After")) || 1);
}

function refusal(status, error, seconds) {
  const isAway = error?.code === "shutting_down" || (!error && [502, 503, 504].includes(status)); // of a proxy
  return isAway ? new Away() : new Refused(status, error, seconds);
}

/** Repeat a request until its result is final. */
export async function ask(path, options, signal) {
  for (let attempt = 0; ; attempt++) {
    const key = sessionStorage.getItem(KEY);
    try {
      return await request(path, options, signal);
    } catch (error) {
      if (error instanceof Away) await whenBack(signal);
      else if (error.status === 401) askForKey(key, error);
      else if (error.code === "rate_limit_exceeded") await sleep(Math.max(error.seconds, Math.min(attempt, 8)), signal);
      else throw error;
    }
  }
}

export const askJson = async (path, signal) => (await ask(path, {}, signal)).json();

/** Wait until the server responds again. */
export async function whenBack(signal) {
  say("The server does not respond. The page continues when it is back.", true);
  do await sleep(PAUSE, signal);
  while (!(await isThere()));
  say("The server is back.");
  dispatchEvent(new Event("serverback"));
}

const isThere = () => fetch("ready", { cache: "no-store" }).then((answer) => answer.ok, () => false);

export function sleep(seconds, signal) {
  signal?.throwIfAborted();
  return new Promise((resolve, reject) => {
    setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}

/** Ask for the server's API key, unless another request got one since `key` was refused. */
function askForKey(key, error) {
  if (sessionStorage.getItem(KEY) !== key) return;
  const reason = key ? "The server rejected that key." : "This server needs an API key.";
  const given = prompt(`${reason} It is stored in this tab until you close it.`)?.trim();
  if (!given || !/^[!-~]+$/.test(given)) throw error; // a header takes no other characters
  sessionStorage.setItem(KEY, given);
}

/** Iterate over the events of an answer as they arrive, or the one value that it is. */
export async function* events(path, options, signal) {
  const answer = await ask(path, options, signal);
  if (!answer.headers.get("Content-Type")?.startsWith("text/event-stream")) return yield await answer.json();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read().catch((error) => {
      throw signal?.aborted ? error : new Away();
    });
    if (done) throw new Away(); // a complete stream ends with [DONE]
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue; // a comment
      const event = JSON.parse(part.slice(6));
      if (event.error) throw refusal(500, event.error);
      yield event;
    }
  }
}
