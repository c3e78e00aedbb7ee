// The state of the page, and what each action does to it: write, go back, open a file, delete.

import { ask, Away, events, jsonBody, patience, Refused } from "./api.js";
import { Card } from "./card.js";
import { isSure, say } from "./dialogs.js";
import { element, make } from "./dom.js";
import * as meter from "./meter.js";
import { learns, readOptions, showLearning } from "./options.js";
import { read, store } from "./storage.js";
import { TextView } from "./text.js";
import * as texts from "./texts.js";
import { textOf } from "./tokens.js";
import { Forest, TreeView } from "./tree.js";
import { discard, dropUnfinished, perform, Turn } from "./turn.js";

export const DRAFT = "lmlong.draft";
const PENDING = "pending";
const PAUSE = 1000; // milliseconds without a token, such as in a queue, that are no part of the rate
const BEGINNINGS = ["def ", "class ", "import "];

const prompt = element("prompt");
const mediaTypes = { ".state": "application/vnd.lmlong.state", ...JSON.parse(element("file").dataset.mediaTypes) };
const refused = JSON.parse(element("file").dataset.refused);
export const narrow = matchMedia("(max-width: 760px)");

let forest = new Forest();
let current = location.hash.slice(1) || null; // id of the chosen session, PENDING, or null for a new text
let isLoaded = false;
let sizes = null; // a function from a number of tokens to the bytes of the state after them
let model = { id: "lmlong", learns: false, writes: null }; // from /v1/models
let work = null; // the running action: {controller, turn, rate, last, count, busy}

const tree = new TreeView(element("tree"), choose);
const view = new TextView(element("text"), choose);
export const card = new Card(element("card"), view, take, say);

export const isBusy = () => work !== null;
export const stop = () => work?.controller.abort();

// Display

export function show() {
  const turn = current === PENDING ? work?.turn : null;
  const path = forest.path(turn ? turn.parent : current);
  const session = forest.nodes.get(current);
  if (view.show(path, turn)) card.hide();
  element("welcome").hidden = Boolean(turn || session);
  element("text").hidden = !(turn || session);
  element("actions").hidden = !session;
  if (session) element("download").title = `The state after this turn as a file: up to ${meter.inBytes(stateBytes(session))}`;
  element("again").disabled = !forest.nodes.has(session?.parent) || Boolean(work);
  element("where").textContent = turn ? `Turn ${path.length + 1}` : session ? place(session) : "";
  prompt.placeholder = session || turn ? "Add your own text, or leave this empty and let the model continue." : "Start of the text";
  element("new").setAttribute("aria-pressed", current === null);
  if (isLoaded) history.replaceState(null, "", session ? `#${current}` : location.pathname + location.search);
  showLearning(Boolean(path.at(-1)?.learns), Boolean(model.learns));
  showTree();
  showMeter();
  showWork();
}

function place(session) {
  const turns = forest.path(session.id).length;
  const beside = forest.children(forest.parentOf(session)).length - 1;
  const learning = session.learns ? " · learns" : "";
  return `Turn ${turns}${turns > 1 && beside ? `, one of ${beside + 1}` : ""}${learning}`;
}

export function showTree() {
  tree.show(forest, current, narrow.matches ? 44 : 34);
}

/** The bytes of a state in memory; older servers and files do not have them. */
const stateBytes = ({ state_bytes: known, tokens, bytes }) => known ?? sizes?.(tokens) ?? bytes;

function showMeter() {
  const turn = current === PENDING ? work?.turn : null;
  const path = forest.path(turn ? turn.parent : current);
  const points = path.map((session) => ({ tokens: session.tokens, bytes: stateBytes(session) }));
  let most = points.at(-1)?.tokens ?? 0;
  if (turn && points.length) {
    const written = turn.asked - turn.left;
    const grown = sizes ? sizes(most + written) - sizes(most) : 0; // of a state that grows with the text
    points.push({ tokens: most + written, bytes: stateBytes(path.at(-1)) + grown });
    most += turn.asked;
  }
  meter.show(points, most, turn ? work.rate : forest.nodes.get(current)?.rate);
}

function showWork() {
  element("stop").hidden = !work;
  element("write").disabled = Boolean(work);
  element("write").textContent = current && !prompt.value ? "Continue" : "Generate";
}

export function choose(id) {
  if (id !== current && id === null) say("New text.");
  current = id;
  document.body.classList.remove("tree-open");
  element("show-tree").setAttribute("aria-expanded", "false");
  show();
}

// Sessions on the server

export async function load() {
  const data = [];
  for (let next = ""; next !== null; ) {
    const part = await (await ask(`v1/sessions${next && `?after=${encodeURIComponent(next)}`}`)).json();
    data.push(...part.data);
    next = part.next ?? null;
  }
  const rates = new Map([...forest.nodes.values()].map(({ id, rate }) => [id, rate]));
  const { pending } = forest;
  isLoaded = true;
  forest = new Forest(data.map((session) => ({ ...session, rate: rates.get(session.id) })));
  forest.pending = pending;
  if (current !== PENDING && !forest.nodes.has(current)) current = null;
}

export async function begin() {
  [model] = (await (await ask("v1/models")).json()).data;
  element("model").textContent = model.id;
  document.title = `${model.id} · lmlong`;
  element("about").textContent = model.about;
  showBeginnings();
  showLook();
  sizes = await meter.stateSizes();
  await load();
  show();
  if (!work && (await dropUnfinished().catch(() => false))) await load().then(show);
}

/** Show how a text may begin. */
function showBeginnings() {
  const begin = (text, name) => {
    const button = make("button", "beginning", name);
    button.type = "button";
    button.addEventListener("click", () => {
      setDraft(text);
      write();
    });
    return button;
  };
  const given = model.writes === "code" ? BEGINNINGS.map((text) => begin(text, make("code", "", text.trim()))) : [];
  element("beginnings").replaceChildren(...given, begin("", "Let the model begin"));
}

/** Follow the switches for colours and the typeface; code is in monospace unless somebody chose otherwise. */
export function showLook() {
  const colours = (element("colours").checked = read("lmlong.colours") ?? true);
  const mono = (element("mono").checked = read("lmlong.mono") ?? model.writes === "code");
  document.body.classList.toggle("plain", !colours);
  document.body.classList.toggle("mono", mono);
}

/** Run an action that takes time and can be stopped; only one runs at a time. */
async function doing(what, action) {
  if (work) return say("The model is generating. Stop it first.");
  work = { controller: new AbortController(), turn: null, rate: 0 };
  showWork();
  say(what);
  const timer = setInterval(showTime, 1000, performance.now());
  try {
    await action(work.controller.signal);
  } catch (error) {
    if (work.controller.signal.aborted) say("Stopped.");
    else await tell(error);
  } finally {
    clearInterval(timer);
    element("countdown").textContent = "";
    element("progress").hidden = true;
    work = null;
    show();
  }
}

/** Show the time until the first token, unless the same place reports that the server is away. */
function showTime(begun) {
  if (!element("now").hidden) return;
  const seconds = Math.round((performance.now() - begun) / 1000);
  if (work.share === undefined) element("countdown").textContent = work.last ? "" : `${seconds} s`;
}

/** Show how much of a text has been read; undefined once all has. */
function showRead(progress) {
  work.share = progress && Math.min(1, progress.read_bytes / Math.max(1, progress.total_bytes));
  element("progress").hidden = !progress;
  element("progress").value = work.share ?? 0;
  if (element("now").hidden) element("countdown").textContent = progress ? `${Math.floor(100 * work.share)} %` : "";
}

export async function tell(error) {
  if (!(error instanceof Refused || error instanceof Away)) console.error(error);
  say(error.status === 404 ? "That turn is no longer on the server." : error.message || "The server stopped responding.", true);
  if (error.status === 404) await load();
}

// Generation

/** Generate with the sampling options if they are valid. */
function writing(action) {
  const options = readOptions();
  if (options) doing("Reading …", (signal) => action(options, signal));
  else say("A sampling option is invalid.", true);
}

export function write() {
  if (current === PENDING) return;
  const text = prompt.value;
  const parent = forest.nodes.get(current)?.id ?? null;
  const learn = learns();
  writing(async (options, signal) => {
    prompt.value = ""; // its draft is kept until the turn is
    let root = null;
    try {
      if (!parent) root = await create({ segments: [{ told: text }], given: 1 }, jsonBody({ text, learn, stream: true }), signal);
      const segments = parent && text ? [{ told: text }] : [];
      await follow(parent ?? root.id, segments, options, signal);
      keepDraft();
    } catch (error) {
      if (root && !forest.children(root.id).length) forget(root.id);
      if (!prompt.value) setDraft(text);
      throw error;
    }
  });
}

/** Delete a first turn that cannot be continued. */
function forget(id) {
  discard(id);
  texts.remove(id);
  forest.nodes.delete(id);
  current = null;
}

/** Generate another version of the selected turn. */
export function again() {
  const { id, parent } = forest.nodes.get(current);
  const entry = texts.get(id);
  writing((options, signal) => follow(parent, entry?.segments.slice(0, entry.given) ?? [], options, signal));
}

/** Fork inside a turn, with an alternative for one of its tokens. */
function take({ id, segment, number, token }, name, logprob) {
  const session = forest.nodes.get(id);
  card.hide();
  if (!session || !forest.nodes.has(session.parent)) {
    return say("The state before this turn is no longer on the server.", true);
  }
  const entry = texts.get(id);
  const { head } = token;
  const other = { text: name.slice(head?.length ?? 0), logprob, others: token.others, head };
  const written = [...entry.segments[segment].written.slice(0, number), other];
  const segments = [...entry.segments.slice(0, segment), { written }];
  writing((options, signal) => follow(session.parent, segments, options, signal));
}

/** Write a turn after a session, and show its progress. */
async function follow(parent, segments, { max_tokens: most, ...sampling }, signal) {
  const turn = new Turn(parent, segments, most, sampling);
  turn.asked = most;
  work.turn = turn;
  forest.pending = { id: PENDING, parent, created: Infinity, label: { told: textOf(segments).slice(0, 28), written: "…" } };
  current = PENDING;
  show();
  let isWatched = true;
  const { session, error } = await perform(turn, signal, () => wrote(turn), showRead).finally(() => {
    forest.pending = null;
    isWatched = current === PENDING;
    if (isWatched) current = parent;
  });
  if (session) {
    const { given, ended } = turn;
    texts.keep(session.id, { segments: turn.segments.filter(({ written }) => written?.length !== 0), given, ended });
    forest.add({ ...session, parent, rate: work.rate });
    if (isWatched) current = session.id;
    const count = turn.asked - turn.left;
    say(signal.aborted ? `Stopped. The generated text is kept.` : `Generated ${count.toLocaleString("en")} tokens.`);
  }
  if (error) throw error;
  if (!session) {
    const told = textOf(segments);
    if (!prompt.value) setDraft(told);
    say("Stopped before the first token.");
  }
}

/** Note new tokens; show them at most once a frame. */
function wrote(turn) {
  const now = performance.now();
  const count = turn.asked - turn.left;
  if (!work.last) {
    Object.assign(work, { busy: 0, counted: 0 });
    showRead();
    say("Generating …");
  } else if (now - work.last < PAUSE) {
    work.busy += now - work.last;
    work.counted += count - work.count;
    work.rate = (1000 * work.counted) / work.busy;
  }
  Object.assign(work, { last: now, count });
  work.frame ||= requestAnimationFrame(() => {
    if (work?.turn !== turn) return;
    work.frame = 0;
    view.grow(turn);
    showMeter();
  });
}

async function create(entry, options, signal, path = "v1/sessions") {
  const session = await created(path, options, signal);
  forest.add(session);
  if (entry) texts.keep(session.id, entry);
  return session;
}

/** Read a text into a new session, and show how much of it has been read. */
async function created(path, options, signal) {
  for (let attempt = 0; ; attempt++) {
    try {
      let session = null;
      for await (const event of events(path, options, signal)) {
        if (event.object === "progress") showRead(event);
        else session = event;
      }
      if (session) return session;
      throw new Away();
    } catch (error) {
      await patience(error, attempt, signal);
    }
  }
}

// Files

/** Open what was dropped or chosen, if it is one file of a kind that can be read. */
export function openFiles(files, isFolder = false) {
  const [file] = files;
  const suffix = file.name.slice(file.name.lastIndexOf(".")).toLowerCase();
  if (isFolder) say("That is a folder. Open one file at a time.", true);
  else if (files.length > 1) say(`These are ${files.length} files. Open one at a time.`, true);
  else if (!file.size) say(`${file.name} is empty.`, true);
  else if (refused[suffix]) say(`${file.name} is ${refused[suffix]}.`, true);
  else openFile(file, mediaTypes[suffix]);
}

function openFile(file, type) {
  const learn = learns();
  doing(`Reading ${file.name} (${meter.inBytes(file.size)}) …`, async (signal) => {
    const headers = { "Content-Type": type ?? "application/octet-stream" };
    const text = type ? null : inUtf8(await file.arrayBuffer());
    const entry = text === null ? null : texts.ofFile(file.name, text);
    const isState = type === mediaTypes[".state"];
    const query = isState ? (learn ? "?learn=true" : "") : `?learn=${learn}&stream=true`; // a state may learn already
    const session = await create(entry, { method: "POST", body: file, headers }, signal, `v1/sessions${query}`);
    current = session.id;
    say(`Read ${file.name}: ${session.tokens.toLocaleString("en")} tokens.`);
    prompt.focus();
  });
}

/** The text of a file, or null if it is not UTF-8, which only the server can read. */
function inUtf8(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return null;
  }
}

function save(data, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** {text, isWhole}: the text up to the end of the current turn, as far as this browser has it. */
function known() {
  const path = forest.path(current);
  const from = path.findLastIndex(({ id }) => !texts.get(id) || texts.get(id).cut);
  const entries = path.slice(Math.max(0, from)).map((session) => texts.get(session.id) ?? { segments: [{ told: session.tail }] });
  return { text: entries.map(({ segments }) => textOf(segments)).join(""), isWhole: from < 0 };
}

function tellKept(what, { text, isWhole }) {
  const size = `${text.length.toLocaleString("en")} characters`;
  say(isWhole ? `${what} ${size}.` : `${what} the last ${size}; this browser does not have the text before.`);
}

export async function copy() {
  const found = known();
  try {
    await navigator.clipboard.writeText(found.text);
    tellKept("Copied", found);
  } catch {
    say("The browser does not let this page copy. Save the text instead.", true);
  }
}

export function saveText() {
  const found = known();
  save(new Blob([found.text], { type: "text/plain" }), `${model.id}-${current.slice(0, 8)}.txt`);
  tellKept("Saved", found);
}

export async function download() {
  const { id } = forest.nodes.get(current);
  try {
    const data = await (await ask(`v1/sessions/${id}/state`)).blob();
    save(data, `${model.id}-${id.slice(0, 8)}.state`);
    say(`The state after this turn: ${meter.inBytes(data.size)}.`);
  } catch (error) {
    await tell(error);
    show();
  }
}

export async function remove() {
  const ids = forest.subtree(current);
  const following = ids.length === 1 ? "" : ` and the ${ids.length - 1} that follow${ids.length === 2 ? "s" : ""} it`;
  if (!(await isSure(`Delete this turn${following}? This cannot be undone.`))) return;
  const above = forest.nodes.get(current).parent;
  doing("Deleting …", async (signal) => {
    for (const id of ids) {
      await ask(`v1/sessions/${id}`, { method: "DELETE" }, signal).catch((error) => {
        if (error.status !== 404) throw error; // another tab was quicker
      });
      texts.remove(id);
      forest.nodes.delete(id);
    }
    current = forest.nodes.has(above) ? above : null;
    say("Deleted.");
  });
}

// The draft

export function setDraft(text) {
  prompt.value = text;
  keepDraft();
}

export function keepDraft() {
  store(DRAFT, JSON.stringify(prompt.value));
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
  showWork();
}
