// A turn: text appended to a fork of a session, and the text that the model writes after it.

import { ask, Away, jsonBody, patience, request, sleep, stream } from "./api.js";
import { read, store } from "./storage.js";
import { Aligner, textOf } from "./tokens.js";

const UNFINISHED = "lmlong.unfinished";
const ATTEMPTS = 10;
const ALTERNATIVES = 5;
const MOMENT = 0.5; // seconds in which a server notices that a reader has gone, and lets go of the session

/** Ids of abandoned forks, which may still be listed until they are deleted. */
export const discarded = new Set();

let turns = 0;

export class Turn {
  /**
   * @param parent   id of the session to continue
   * @param segments what is told first: [{told: text}, {written: tokens}], the latter of another turn
   * @param left     tokens to write
   * @param sampling the other options
   */
  constructor(parent, segments, left, sampling) {
    Object.assign(this, { parent, left, sampling, number: `turn ${++turns}`, ended: false, given: segments.length });
    this.segments = [...segments, { written: [] }];
  }

  get written() {
    return this.segments.at(-1).written;
  }
}

/**
 * Write a turn; repeat it if the server goes away meanwhile. `changed` is called after new tokens, `reading` while the
 * prompt is read.
 * Return {session, error}: the session after exactly the text of the turn, or null if nothing was written.
 */
export async function perform(turn, signal, changed, reading) {
  for (let attempt = 0; ; attempt++) {
    let fork = null;
    try {
      if (turn.left <= 0) return { session: await keep(turn), error: null };
      fork = await forkOf(turn.parent, signal);
      noteUnfinished(fork);
      return { session: await write(turn, fork, signal, changed, reading), error: null };
    } catch (failure) {
      if (fork) discard(fork.id);
      const error = await lasting(failure, attempt, signal);
      if (!error) continue;
      const session = turn.written.length ? await keep(turn) : null;
      return { session, error: signal.aborted ? null : error };
    } finally {
      noteUnfinished(null);
    }
  }
}

/** Store the id of the fork in use, for the case that the page is closed and opened again. */
const noteUnfinished = (fork) => store(UNFINISHED, JSON.stringify(fork), "sessionStorage");

/** Delete the fork that this tab was using when it was closed; return whether there was one. */
export async function dropUnfinished() {
  const fork = read(UNFINISHED, "sessionStorage");
  noteUnfinished(null);
  for (let attempt = 0; fork && attempt < ATTEMPTS; attempt++) {
    await sleep(MOMENT);
    const { tokens } = await (await ask(`v1/sessions/${fork.id}`)).json();
    if (tokens !== fork.tokens) return false; // a second tab like this one finished it
    try {
      await request(`v1/sessions/${fork.id}`, { method: "DELETE" });
      return true;
    } catch (error) {
      if (error.status !== 409) throw error;
    }
  }
  return false;
}

/** The error that ends a turn; null once it has passed. */
async function lasting(error, attempt, signal) {
  try {
    if (signal.aborted) return error;
    await patience(error, attempt, signal);
    return null;
  } catch (last) {
    return last;
  }
}

/** Append the text of the turn so far to the fork, and continue it. */
async function write(turn, fork, signal, changed, reading) {
  const aligner = new Aligner();
  const body = { session: fork.id, prompt: textOf(turn.segments), logprobs: ALTERNATIVES, max_tokens: turn.left, stream_options: { include_progress: true } };
  let session = null;
  for await (const chunk of stream("v1/completions", { ...body, ...turn.sampling }, signal)) {
    session = chunk.session ?? session;
    if (chunk.progress) reading(chunk.progress);
    for (const choice of chunk.choices) {
      turn.written.push(...aligner.add(choice));
      turn.left -= choice.logprobs?.tokens.length ?? 0;
      turn.ended ||= choice.finish_reason === "stop";
      changed();
    }
  }
  if (!session) throw new Away();
  return session;
}

/**
 * Return a session that has read the text of a stopped turn. The fork in use has not read it, or has read more if the
 * end was lost on its way, so a new session reads what the user has seen.
 */
async function keep(turn) {
  for (let attempt = 0; ; attempt++) {
    const fork = await forkOf(turn.parent);
    try {
      const path = `v1/sessions/${fork.id}/append`;
      const { learn } = turn.sampling;
      return await (await request(path, jsonBody({ text: textOf(turn.segments), learn }))).json();
    } catch (error) {
      discard(fork.id);
      await patience(error, attempt);
    }
  }
}

async function forkOf(id, signal) {
  return (await ask(`v1/sessions/${id}/fork`, jsonBody({}), signal)).json();
}

/** Delete an unfinished fork in the background. */
export function discard(id) {
  discarded.add(id);
  const remove = () => ask(`v1/sessions/${id}`, { method: "DELETE" });
  sleep(MOMENT).then(remove).catch(() => {});
}
