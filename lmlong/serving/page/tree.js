// The tree of sessions: consecutive turns are drawn downwards, and forks branch to the right.

import { make, makeSvg } from "./dom.js";
import { discarded } from "./turn.js";
import { textOf } from "./tokens.js";
import * as texts from "./texts.js";

const LANE = 14; // pixels from one line to the next
const LANES = 9;

/** The sessions by id, and their children. */
export class Forest {
  constructor(sessions = []) {
    this.nodes = new Map();
    this.pending = null; // a turn that is being written: {id, parent, label}
    for (const session of sessions) if (!discarded.has(session.id)) this.add(session);
  }

  add(session) {
    this.nodes.set(session.id, session);
  }

  /** Ids of the sessions that follow one, the oldest first; of null those that follow none. */
  children(id) {
    return this.following().get(id) ?? [];
  }

  /** The same for all sessions, by their ids. */
  following(nodes = this.nodes.values()) {
    const children = new Map();
    for (const node of nodes) {
      const parent = this.parentOf(node);
      if (children.has(parent)) children.get(parent).push(node.id);
      else children.set(parent, [node.id]);
    }
    return children;
  }

  parentOf({ parent }) {
    return this.nodes.has(parent) ? parent : null;
  }

  /** The sessions from the first to this one. */
  path(id) {
    const found = [];
    const seen = new Set();
    for (let node = this.nodes.get(id); node && !seen.has(node.id); node = this.nodes.get(node.parent)) {
      seen.add(node.id);
      found.push(node);
    }
    return found.reverse();
  }

  /** A session and all that follow it, the last first. */
  subtree(id) {
    const children = this.following();
    const found = [id];
    for (let at = 0; at < found.length; at++) found.push(...(children.get(found[at]) ?? []));
    return found.reverse();
  }

  /** Rows from top to bottom: {id, parent, lane, level}. The first that follows a node stays on its line, below the others. */
  rows() {
    const children = this.following([...this.nodes.values(), ...(this.pending ? [this.pending] : [])]);
    const rows = [];
    const waiting = (children.get(null) ?? []).map((id) => ({ id, parent: null, lane: 0, level: 1 }));
    while (waiting.length) {
      const row = waiting.pop();
      rows.push(row);
      const [first, ...others] = children.get(row.id) ?? [];
      const below = { parent: row.id, level: row.level + 1 };
      if (first !== undefined) waiting.push({ ...below, id: first, lane: row.lane });
      for (const id of others.reverse()) waiting.push({ ...below, id, lane: Math.min(row.lane + 1, LANES) });
    }
    return rows;
  }
}

/** The label of a node: its prompt and the generated text. */
export function label(session) {
  const entry = texts.get(session.id);
  if (!entry) return { told: "", written: session.tail ? `… ${session.tail.slice(-60)}` : "(empty)" };
  if (entry.name) return { told: entry.name, written: "" };
  const given = entry.segments.slice(0, entry.given);
  const last = given.at(-1);
  const told = last?.written ? `… ${last.written.at(-1).text}` : textOf(given).trim(); // the token that was chosen
  const written = textOf(entry.segments.slice(entry.given)).trim();
  return { told: told.length > 28 && written ? `${told.slice(0, 27)}…` : told.slice(0, 80), written: written.slice(0, 80) };
}

/** Shows a forest in an element; `choose` is called with the id of the selected row. */
export class TreeView {
  constructor(element, choose) {
    this.element = element;
    element.addEventListener("click", (event) => {
      const row = event.target.closest("[data-id]");
      if (row) choose(row.dataset.id);
    });
    element.addEventListener("keydown", (event) => this.#move(event, choose));
  }

  show(forest, current, height) {
    const rows = forest.rows();
    const onPath = new Set([current, ...forest.path(current).map((node) => node.id)]);
    if (current === forest.pending?.id) for (const { id } of forest.path(forest.pending.parent)) onPath.add(id);
    const hadFocus = this.element.contains(document.activeElement);
    const items = rows.map((row) => this.#row(row, forest, current));
    if (items.length && !items.some((item) => item.tabIndex === 0)) items[0].tabIndex = 0;
    this.element.replaceChildren(lines(rows, onPath, height), ...items);
    const chosen = this.element.querySelector("[aria-selected=true]");
    if (hadFocus) (chosen ?? items[0])?.focus();
    chosen?.scrollIntoView({ block: "nearest" });
  }

  #row({ id, lane, level }, forest, current) {
    const session = forest.nodes.get(id);
    const { told, written } = session ? label(session) : forest.pending.label;
    const line = [part("told", told), told && written ? " " : "", part("written", written || (told ? "" : "(empty)"))];
    const learns = session?.learns ? [part("learns", "learns")] : [];
    const item = make("div", "", [part("line", line), ...learns, part("count", session ? compact(session.tokens) : "…")]);
    item.setAttribute("role", "treeitem");
    item.setAttribute("aria-level", level);
    item.setAttribute("aria-selected", id === current);
    item.tabIndex = id === current ? 0 : -1;
    item.dataset.id = id;
    item.style.paddingLeft = `${(lane + 1) * LANE + 10}px`;
    if (session) item.title = `${session.tokens.toLocaleString("en")} tokens, ${when(session.created)}`;
    else item.classList.add("pending");
    return item;
  }

  #move(event, choose) {
    const items = [...this.element.querySelectorAll("[data-id]")];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (at < 0) return;
    if (event.key === "Enter" || event.key === " ") choose(items[at].dataset.id);
    else if (to !== undefined) items[Math.max(0, Math.min(to, items.length - 1))].focus();
    else return;
    event.preventDefault();
  }
}

const part = (name, content) => make("span", name, content);

const compact = (count) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(count);

function when(seconds) {
  return new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** The lines between the rows, and a dot at each row. */
function lines(rows, onPath, height) {
  const place = new Map(rows.map(({ id, lane }, number) => [id, [(lane + 1) * LANE, (number + 0.5) * height]]));
  const svg = makeSvg("svg", { "aria-hidden": true, height: rows.length * height, width: (LANES + 2) * LANE });
  const draw = (name, attributes) => svg.append(makeSvg(name, attributes));
  const state = (id) => (onPath.has(id) ? "on" : "off");
  for (const { id, parent } of [...rows].sort((one, other) => onPath.has(one.id) - onPath.has(other.id))) {
    if (!place.has(parent)) continue;
    const [[x, y], [fromX, fromY]] = [place.get(id), place.get(parent)];
    const bend = Math.min(10, height / 2);
    const d = x === fromX ? `M${x} ${fromY}V${y}` : `M${fromX} ${fromY}V${y - bend}Q${fromX} ${y} ${x} ${y}`;
    draw("path", { d, class: state(id) });
  }
  for (const { id } of rows) {
    const [cx, cy] = place.get(id);
    draw("circle", { cx, cy, r: onPath.has(id) ? 4.5 : 3.5, class: state(id) });
  }
  return svg;
}
