// The page: what is shown, and what happens where somebody writes, goes back, opens a file, or deletes.

import { ask, Away, isThere, jsonBody, page, Refused, whenBack } from "./api.js";
import { Card } from "./card.js";
import * as meter from "./meter.js";
import { readOptions } from "./options.js";
import { askForKey, isSure, pause, say } from "./dialogs.js";
import { TextView } from "./text.js";
import * as texts from "./texts.js";
import { textOf } from "./tokens.js";
import { Forest, TreeView } from "./tree.js";
import { perform, Turn } from "./turn.js";

const LOOK = 15; // seconds between two looks at a server that nothing is asked of
const DRAFT = "lmlong.draft";
const PENDING = "pending";
const STATE = "application/vnd.lmlong.state";

const element = (id) => document.getElementById(id);
const prompt = element("prompt");
const narrow = matchMedia("(max-width: 760px)");

let forest = new Forest();
let current = location.hash.slice(1) || null; // id of the chosen session, PENDING, or null for a new text
let work = null; // what goes on: {turn, controller, begun, rate}

const tree = new TreeView(element("tree"), choose);
const view = new TextView(element("text"), choose);
const card = new Card(element("card"), view, take, say);

// What is shown

function show() {
  const turn = current === PENDING ? work?.turn : null;
  const path = forest.path(turn ? turn.parent : current);
  const session = forest.nodes.get(current);
  view.show(path, turn);
  card.hide();
  element("welcome").hidden = Boolean(turn || session);
  element("text").hidden = !(turn || session);
  element("actions").hidden = !session;
  element("again").disabled = !forest.nodes.has(session?.parent) || Boolean(work);
  element("where").textContent = session ? place(session) : "";
  prompt.placeholder = session || turn ? "Go on in your words, or let the model go on by itself." : "How does the text begin?";
  element("new").setAttribute("aria-pressed", current === null);
  history.replaceState(null, "", session ? `#${current}` : location.pathname + location.search);
  showTree();
  showMeter();
  showWork();
}

function place(session) {
  const turns = forest.path(session.id).length;
  const beside = forest.children(forest.parentOf(session)).length - 1;
  return `Turn ${turns}${turns > 1 && beside ? `, one of ${beside + 1}` : ""}`;
}

function showTree() {
  tree.show(forest, current, narrow.matches ? 44 : 34);
}

function showMeter() {
  const turn = current === PENDING ? work?.turn : null;
  const path = forest.path(turn ? turn.parent : current);
  const points = path.map(({ tokens, bytes }) => ({ tokens, bytes }));
  let most = points.at(-1)?.tokens ?? 0;
  if (turn && points.length) {
    const written = turn.asked - turn.left;
    points.push({ tokens: most + written, bytes: points.at(-1).bytes });
    most += turn.asked;
  }
  meter.show(points, most, turn ? work.rate : forest.nodes.get(current)?.rate);
}

function showWork() {
  element("stop").hidden = !work;
  element("write").disabled = Boolean(work);
  element("write").textContent = current && !prompt.value ? "Go on" : "Write";
}

function choose(id) {
  if (id !== current && id === null) say("A new text.");
  current = id;
  document.body.classList.remove("tree-open");
  element("show-tree").setAttribute("aria-expanded", "false");
  show();
}

// What the server knows

async function load() {
  const { data } = await (await ask("v1/sessions")).json();
  const rates = new Map([...forest.nodes.values()].map(({ id, rate }) => [id, rate]));
  const { pending } = forest;
  forest = new Forest(data.map((session) => ({ ...session, rate: rates.get(session.id) })));
  forest.pending = pending;
  if (current !== PENDING && !forest.nodes.has(current)) current = null;
}

async function begin() {
  const models = await (await ask("v1/models")).json();
  element("model").textContent = models.data[0].id;
  document.title = `${models.data[0].id} · lmlong`;
  await load();
  show();
}

/** Do something that takes a while and can be stopped, one thing at a time. */
async function doing(what, action) {
  if (work) return say("Something is being written. Stop it first.");
  work = { controller: new AbortController(), turn: null, rate: 0 };
  showWork();
  say(what);
  try {
    await action(work.controller.signal);
  } catch (error) {
    if (work.controller.signal.aborted) say("Stopped.");
    else await tell(error);
  } finally {
    work = null;
    show();
  }
}

async function tell(error) {
  if (!(error instanceof Refused || error instanceof Away)) console.error(error);
  say(error.status === 404 ? "That turn is no longer on the server." : error.message || "The server went away.", true);
  if (error.status === 404) await load();
}

// Writing

function write() {
  const options = readOptions();
  if (!options) return say("One of the sampling options is not valid.", true);
  const text = prompt.value;
  const parent = forest.nodes.get(current)?.id ?? null;
  if (current === PENDING) return;
  doing("Reading …", async (signal) => {
    setDraft("");
    try {
      const root = parent ?? (await create({ segments: [{ told: text }], given: 1 }, jsonBody({ text }), signal)).id;
      const segments = parent && text ? [{ told: text }] : [];
      await follow(root, segments, options, signal);
    } catch (error) {
      if (!prompt.value) setDraft(text);
      throw error;
    }
  });
}

/** Write another text in the place of the chosen one. */
function again() {
  const { id, parent } = forest.nodes.get(current);
  const entry = texts.get(id);
  const options = readOptions();
  if (!options) return say("One of the sampling options is not valid.", true);
  doing("Reading …", (signal) => follow(parent, entry?.segments.slice(0, entry.given) ?? [], options, signal));
}

/** Go on from within a turn, with an alternative in the place of a token. */
function take({ id, segment, number, token }, name, logprob) {
  const session = forest.nodes.get(id);
  const options = readOptions();
  card.hide();
  if (!session || !options || !forest.nodes.has(session.parent)) {
    return say("The text before this turn is no longer there to go on from.", true);
  }
  const entry = texts.get(id);
  const { head } = token;
  const other = { text: name.slice(head?.length ?? 0), logprob, others: token.others, head };
  const written = [...entry.segments[segment].written.slice(0, number), other];
  const segments = [...entry.segments.slice(0, segment), { written }];
  doing("Reading …", (signal) => follow(session.parent, segments, options, signal));
}

/** Make a turn after a session, and show it while it is written. */
async function follow(parent, segments, { max_tokens: most, ...sampling }, signal) {
  const turn = new Turn(parent, segments, most, sampling);
  turn.asked = most;
  work.turn = turn;
  forest.pending = { id: PENDING, parent, created: Infinity, label: { told: textOf(segments).slice(0, 28), written: "…" } };
  current = PENDING;
  show();
  let isWatched = true;
  const { session, error } = await perform(turn, signal, () => wrote(turn)).finally(() => {
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
    say(signal.aborted ? `Stopped. What was written is kept.` : `Wrote ${count.toLocaleString("en")} tokens.`);
  }
  if (error) throw error;
  if (!session) {
    const told = textOf(segments);
    if (!prompt.value) setDraft(told);
    say("Stopped before anything was written.");
  }
}

/** Note what came; show it at most once a frame. */
function wrote(turn) {
  const now = performance.now();
  const count = turn.asked - turn.left;
  if (!work.begun) {
    Object.assign(work, { begun: now, before: count });
    say("Writing …");
  } else work.rate = (1000 * (count - work.before)) / (now - work.begun);
  work.frame ||= requestAnimationFrame(() => {
    if (work?.turn !== turn) return;
    work.frame = 0;
    view.grow(turn);
    showMeter();
  });
}

async function create(entry, body, signal) {
  const session = await (await ask("v1/sessions", body, signal)).json();
  forest.add(session);
  if (entry) texts.keep(session.id, entry);
  return session;
}

// Files

function openFile(file) {
  const isState = file.name.endsWith(".state");
  doing(`Reading ${file.name} (${meter.inBytes(file.size)}) …`, async (signal) => {
    const headers = { "Content-Type": isState ? STATE : "application/octet-stream" };
    const entry = isState ? null : texts.ofFile(file.name, await file.text());
    const session = await create(entry, { method: "POST", body: file, headers }, signal);
    current = session.id;
    say(`Read ${file.name}: ${session.tokens.toLocaleString("en")} tokens.`);
    prompt.focus();
  });
}

async function download() {
  const { id } = forest.nodes.get(current);
  try {
    const data = await (await ask(`v1/sessions/${id}/state`)).blob();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(data);
    link.download = `${element("model").textContent}-${id.slice(0, 8)}.state`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    say(`The state after this turn: ${meter.inBytes(data.size)}.`);
  } catch (error) {
    await tell(error);
    show();
  }
}

async function remove() {
  const ids = forest.subtree(current);
  const following = ids.length === 1 ? "" : ` and the ${ids.length - 1} that follow${ids.length === 2 ? "s" : ""} it`;
  if (!(await isSure(`Delete this turn${following}? They cannot be had back.`))) return;
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

// What people do

function setDraft(text) {
  prompt.value = text;
  keepDraft();
}

function keepDraft() {
  texts.wrote(DRAFT, JSON.stringify(prompt.value));
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
  showWork();
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
prompt.addEventListener("input", keepDraft);
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    write();
  } else if (event.key === "Escape") {
    if (card.isOpen) card.hide();
    else if (document.body.classList.contains("tree-open")) element("show-tree").click();
    else work?.controller.abort();
  }
});
element("stop").addEventListener("click", () => {
  work?.controller.abort();
  prompt.focus();
});
element("again").addEventListener("click", again);
element("download").addEventListener("click", download);
element("delete").addEventListener("click", remove);
element("new").addEventListener("click", () => {
  choose(null);
  prompt.focus();
});
element("open").addEventListener("click", () => element("file").click());
element("file").addEventListener("change", ({ target }) => {
  if (target.files[0]) openFile(target.files[0]);
  target.value = "";
});
element("show-tree").addEventListener("click", ({ currentTarget }) => {
  const isOpen = document.body.classList.toggle("tree-open");
  currentTarget.setAttribute("aria-expanded", isOpen);
  if (isOpen) element("new").focus();
});
narrow.addEventListener("change", showTree);

addEventListener("dragover", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  element("drop").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) element("drop").hidden = true;
});
addEventListener("drop", (event) => {
  element("drop").hidden = true;
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  openFile(event.dataTransfer.files[0]);
});

for (const [id, name] of [["colours", "plain"], ["mono", "mono"]]) {
  const box = element(id);
  const key = `lmlong.${id}`;
  box.checked = texts.read(key) ?? box.checked;
  const follows = () => document.body.classList.toggle(name, id === "colours" ? !box.checked : box.checked);
  box.addEventListener("change", () => texts.wrote(key, JSON.stringify(box.checked)));
  box.addEventListener("change", follows);
  follows();
}

// The server's condition

Object.assign(page, {
  askForKey,
  pause,
  back() {
    say("The server is back.");
    if (!work) begin().catch(tell);
  },
});

async function look() {
  if (document.visibilityState === "visible" && !(await isThere())) await whenBack();
  setTimeout(look, 1000 * LOOK);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && !work) load().then(show, tell);
});

setDraft(texts.read(DRAFT) ?? "");
show();
begin().catch(tell);
setTimeout(look, 1000 * LOOK);
prompt.focus();
