// What the page shows, and what each action does: generate, fork, open a file, delete.

import { ask, askJson, Away, events, jsonBody, request, sleep, whenBack } from "./api.js";
import { Card } from "./card.js";
import { element, say } from "./dom.js";
import { readOptions, showOptions } from "./options.js";
import { add, load, parentOf, passagesOf, pathTo, remove, sessions, subtree, textOf } from "./sessions.js";
import { TextView } from "./text.js";
import { Aligner } from "./tokens.js";
import { TreeView } from "./tree.js";

const SHOWN = 40_000; // characters of a text that are shown at first
const MOMENT = 0.25; // seconds in which a server notices that nobody reads a stream, and keeps its text
const MOMENTS = 40;
const ALTERNATIVES = 5;

const prompt = element("prompt");
const mediaTypes = { ".state": "application/vnd.lmlong.state", ...JSON.parse(element("file").dataset.mediaTypes) };

let model = { id: "lmlong", learns: false, writes: null }; // from /v1/models
let current = location.hash.slice(1) || null; // the id of the selected session; null for a new text
let most = SHOWN; // characters that are shown
let shown = null; // names what the view shows
let work = null; // the AbortController of the running action

const tree = new TreeView(element("tree"), choose);
const view = new TextView(element("text"));
export const card = new Card(element("card"), view, fork);

export const isBusy = () => work !== null;
export const stop = () => work?.abort();

// Display

export function show() {
  const session = sessions.get(current);
  const path = pathTo(current);
  element("welcome").hidden = Boolean(session);
  element("text").hidden = element("actions").hidden = !session;
  element("again").disabled = !session || !parentOf(session) || Boolean(work);
  element("delete").disabled = Boolean(work);
  element("where").textContent = session ? `Turn ${path.length}${session.learns ? " · learns" : ""}` : "";
  prompt.placeholder = session ? "Add your own text, or leave this empty to continue." : "Start of the text";
  element("new").setAttribute("aria-pressed", !session);
  history.replaceState(null, "", session ? `#${current}` : location.pathname + location.search);
  showOptions(model, Boolean(session?.learns));
  tree.show(current);
  showSize(session);
  showButtons();
  showText(path).catch(tell);
}

/** Show the texts of a path, of which those that were never asked for come from the server. */
async function showText(path) {
  const name = [most, ...path.map(({ id }) => id)].join(" ");
  if (name === shown) return;
  shown = name;
  card.hide();
  const turns = [];
  let left = most;
  for (const { id } of path.toReversed()) {
    if (left <= 0) break;
    const passages = await passagesOf(id);
    if (shown !== name) return; // something else was selected meanwhile
    turns.unshift({ id, passages });
    left -= textOf(passages).length;
  }
  const isWhole = left >= 0 && turns.length === path.length;
  view.show(turns, Boolean(sessions.get(current)?.pending), most, isWhole ? null : showAll);
}

function showAll() {
  most = Infinity;
  show();
  element("text").focus();
}

function showSize(session) {
  element("meter").hidden = !session;
  if (!session) return;
  element("text-size").textContent = `${session.tokens.toLocaleString("en")} tokens`;
  element("state-size").textContent = inBytes(session.state_bytes);
}

function inBytes(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

/** Show the buttons and the prompt as what they do now. */
export function showButtons() {
  element("stop").hidden = !work;
  element("write").hidden = Boolean(work);
  element("write").textContent = current && !prompt.value ? "Continue" : "Generate";
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
}

export function choose(id) {
  current = id;
  most = SHOWN;
  document.body.classList.remove("tree-open");
  element("show-tree").setAttribute("aria-expanded", "false");
  show();
}

/** Ask for the model and the sessions. */
export async function begin() {
  [model] = (await askJson("v1/models")).data;
  element("model").textContent = model.id;
  document.title = `${model.id} · lmlong`;
  element("about").textContent = model.about;
  await refresh();
}

export async function refresh() {
  await load();
  if (!sessions.has(current)) current = null;
  show();
}

export async function tell(error) {
  if (!error.status && !(error instanceof Away)) console.error(error);
  shown = null;
  if (error.status === 404) await refresh();
  say(error.status === 404 ? "That turn is no longer on the server." : error.message, true);
}

/** Run an action that takes time and can be stopped; only one runs at a time. */
async function doing(what, action) {
  if (work) return say("The model is generating. Stop it first.");
  work = new AbortController();
  const { signal } = work;
  say(what);
  showButtons();
  try {
    await action(signal);
  } catch (error) {
    if (signal.aborted) say("Stopped before the first token.");
    else await tell(error);
  } finally {
    work = null;
    prompt.readOnly = false;
    showProgress(null);
    show();
  }
}

/** Show how much of a text has been read; null once all has. */
function showProgress(progress) {
  element("progress").hidden = !progress;
  element("progress").value = progress ? progress.read_bytes / Math.max(1, progress.total_bytes) : 0;
}

// Generation

/** Generate after the selected session, or begin a new text. */
export function write() {
  generate(sessions.has(current) ? current : null, prompt.value);
}

/** Generate another version of the selected turn. */
export async function again() {
  const { id, parent } = sessions.get(current);
  const passages = await passagesOf(id);
  const given = passages.findIndex(({ tokens }) => tokens);
  generate(parent, textOf(given < 0 ? passages : passages.slice(0, given)));
}

/** Fork inside a turn, with an alternative for one of its tokens. */
async function fork({ id, passage, number }, name) {
  card.hide();
  const session = sessions.get(id);
  if (!session || !parentOf(session)) return say("The text before this turn is no longer on the server.", true);
  const passages = await passagesOf(id);
  const before = passages.slice(0, passages.indexOf(passage));
  generate(session.parent, textOf([...before, { tokens: passage.tokens.slice(0, number) }]) + name);
}

function generate(parent, text) {
  const options = readOptions();
  if (!options) return say("A sampling option is invalid.", true);
  doing("Reading …", async (signal) => {
    const typed = text === prompt.value ? text : null;
    prompt.readOnly = typed !== null; // it stays there until it is read
    if (parent === null) {
      const { learn = false } = options;
      current = parent = (await create("v1/sessions", jsonBody({ text, learn, stream: true }), signal)).id;
      prompt.value = text = "";
      prompt.readOnly = false;
      show();
    }
    const seed = Math.floor(Math.random() * 2 ** 53); // so that a repeated request gives the same text
    const body = { session: parent, fork: true, prompt: text, logprobs: ALTERNATIVES, seed, ...options };
    while (!(await generated(body, typed, signal)));
  });
}

/** Generate a turn; return whether it is over, or was broken off because the server went away. */
async function generated(body, typed, signal) {
  const turn = { id: null, aligner: new Aligner(), passages: [], tokens: 0, begun: 0 };
  try {
    const session = await streamed(turn, body, typed, signal);
    const rate = Math.round((1000 * turn.tokens) / (performance.now() - turn.begun));
    finish(session, `Generated ${turn.tokens.toLocaleString("en")} tokens, ${rate.toLocaleString("en")} a second.`);
    return true;
  } catch (error) {
    const isAway = error instanceof Away;
    if (isAway) await whenBack(signal);
    const kept = turn.tokens ? await saved(turn.id, isAway ? 1 : MOMENTS) : null;
    if (kept) {
      remove(turn.id); // the server has a longer text
      shown = null;
      finish(kept, `${signal.aborted ? "Stopped." : error.message} The generated text is kept.`);
    }
    if (!kept && !isAway) throw error;
    return Boolean(kept);
  } finally {
    if (sessions.get(turn.id)?.pending) {
      remove(turn.id);
      if (current === turn.id) current = body.session;
    }
  }
}

/** Show a turn while it is generated; return the session after it. */
async function streamed(turn, body, typed, signal) {
  const streaming = { stream: true, stream_options: { include_progress: true } };
  for await (const chunk of events("v1/completions", jsonBody({ ...body, ...streaming }), signal)) {
    turn.id ??= chunk.session?.id;
    if (chunk.progress) showProgress(chunk.progress);
    else if (chunk.session?.tokens) return chunk.session;
    for (const choice of chunk.choices) {
      grow(turn, turn.aligner.add(choice), body, typed);
      turn.tokens += choice.logprobs?.tokens.length ?? 0;
    }
  }
  throw new Away();
}

/** Add generated tokens to a turn; its first ones put it into the tree. */
function grow(turn, tokens, body, typed) {
  if (!turn.begun) {
    turn.begun = performance.now();
    const [first] = tokens;
    const covered = Math.min(first?.head?.length ?? 0, body.prompt.length); // by the first token
    const given = body.prompt.slice(0, body.prompt.length - covered);
    if (covered) {
      first.text = first.head.slice(-covered) + first.text;
      first.head = first.head.slice(0, -covered);
    }
    turn.passages = [...(given ? [{ by: "reader", text: given }] : []), { by: "model", tokens: [] }];
    const about = { id: turn.id, parent: body.session, given: body.prompt, written: "…", pending: true };
    add({ ...sessions.get(body.session), ...about }, turn.passages);
    current = turn.id;
    if (prompt.value === typed) prompt.value = "";
    prompt.readOnly = false;
    showProgress(null);
    say("Generating …");
    show();
  }
  const passage = turn.passages.at(-1);
  const from = passage.tokens.length;
  passage.tokens.push(...tokens);
  if (current === turn.id && element("text").classList.contains("writing")) view.append(turn.id, passage, from);
}

function finish(session, message) {
  sessions.set(session.id, session);
  element("text").classList.remove("writing");
  say(message);
}

/** The session that keeps what was generated before a request was broken off, or null. */
async function saved(id, attempts) {
  for (; attempts > 0; attempts--) {
    await sleep(MOMENT);
    const answer = await request(`v1/sessions/${id}`).catch(() => null);
    if (answer) return answer.json();
  }
  return null;
}

// Files

/** Open what was dropped or chosen, if it is one file of a kind that can be read. */
export function openFiles(files, isFolder = false) {
  const [file] = files;
  const suffix = file.name.slice(file.name.lastIndexOf(".")).toLowerCase();
  if (isFolder) say("That is a folder. Open one file at a time.", true);
  else if (files.length > 1) say(`These are ${files.length} files. Open one at a time.`, true);
  else if (!file.size) say(`${file.name} is empty.`, true);
  else openFile(file, mediaTypes[suffix] ?? "application/octet-stream");
}

function openFile(file, type) {
  doing(`Reading ${file.name} (${inBytes(file.size)}) …`, async (signal) => {
    const learn = element("learn").checked;
    const mayLearn = type === mediaTypes[".state"] && !learn; // already
    const query = mayLearn ? "" : `?learn=${learn}&stream=true`;
    const options = { method: "POST", body: file, headers: { "Content-Type": type } };
    const session = await create(`v1/sessions${query}`, options, signal);
    current = session.id;
    say(`Read ${file.name}: ${session.tokens.toLocaleString("en")} tokens.`);
    prompt.focus();
  });
}

/** Read a text into a new session, and show how much of it has been read. */
async function create(path, options, signal) {
  for await (const event of events(path, options, signal)) {
    if (event.object === "session") {
      sessions.set(event.id, event);
      return event;
    }
    showProgress(event);
  }
  throw new Away();
}

export async function saveText() {
  const turns = await Promise.all(pathTo(current).map(({ id }) => passagesOf(id)));
  save(new Blob(turns.map(textOf), { type: "text/plain" }), "txt");
}

export async function saveState() {
  save(await (await ask(`v1/sessions/${current}/state`)).blob(), "state");
}

function save(data, suffix) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data);
  link.download = `${model.id}-${current.slice(0, 8)}.${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`Saved ${link.download}: ${inBytes(data.size)}.`);
}

export function deleteTurn() {
  const ids = subtree(current);
  const following = ids.length === 1 ? "" : ` and the ${ids.length - 1} that follow${ids.length === 2 ? "s" : ""} it`;
  if (!confirm(`Delete this turn${following}? This cannot be undone.`)) return;
  doing("Deleting …", async (signal) => {
    const above = parentOf(sessions.get(current));
    for (const id of ids) {
      await ask(`v1/sessions/${id}`, { method: "DELETE" }, signal).catch((error) => {
        if (error.status !== 404) throw error; // another tab was quicker
      });
      remove(id);
    }
    current = above;
    say("Deleted.");
  });
}
