// The tree of sessions: consecutive turns are drawn downwards, and forks branch to the right.

import { make, makeSvg } from "./dom.js";
import { discarded } from "./turn.js";
import { textOf } from "./tokens.js";
import * as texts from "./texts.js";

const LANE = 14; // pixels from one line to the next
const LANES = 9;
const BESIDE = 100; // rows that are made above and below those in view

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

  /** Rows from top to bottom: {id, parent, lane, level, and its place among beside others}. The first that follows a node stays on its line, below the others. */
  rows() {
    const children = this.following([...this.nodes.values(), ...(this.pending ? [this.pending] : [])]);
    const rows = [];
    const roots = children.get(null) ?? [];
    const waiting = roots.map((id, number) => ({ id, parent: null, lane: 0, level: 1, place: roots.length - number, beside: roots.length }));
    while (waiting.length) {
      const row = waiting.pop();
      rows.push(row);
      const [first, ...others] = children.get(row.id) ?? [];
      const beside = others.length + 1;
      const below = { parent: row.id, level: row.level + 1, beside };
      if (first !== undefined) waiting.push({ ...below, id: first, lane: row.lane, place: beside });
      others.reverse().forEach((id, number) => {
        waiting.push({ ...below, id, lane: Math.min(row.lane + 1, LANES), place: others.length - number });
      });
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

/** Shows a forest in an element, whose visible rows alone are made; `choose` is called with the id of the selected row. */
export class TreeView {
  constructor(element, choose) {
    this.element = element;
    this.sheet = make("div");
    this.sheet.setAttribute("role", "none");
    element.append(this.sheet);
    Object.assign(this, { rows: [], height: 1 });
    element.addEventListener("click", (event) => {
      const row = event.target.closest("[data-id]");
      if (row) choose(row.dataset.id);
    });
    element.addEventListener("keydown", (event) => this.#move(event, choose));
    element.addEventListener("scroll", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(element);
  }

  show(forest, current, height) {
    const hadFocus = this.element.contains(document.activeElement);
    Object.assign(this, { forest, current, height, rows: forest.rows() });
    this.numbers = new Map(this.rows.map(({ id }, number) => [id, number]));
    this.onPath = new Set([current, ...forest.path(current).map((node) => node.id)]);
    if (current === forest.pending?.id) for (const { id } of forest.path(forest.pending.parent)) this.onPath.add(id);
    this.sheet.style.height = `${this.rows.length * height}px`;
    if (this.numbers.has(current)) this.#reveal(this.numbers.get(current));
    this.#draw(true);
    if (hadFocus) this.#item(current)?.focus({ preventScroll: true });
  }

  /** Make the rows that are in view, and some beside them. */
  #draw(isNew = false) {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - BESIDE);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / this.height) + BESIDE);
    if (!isNew && first === this.first && last === this.last) return;
    Object.assign(this, { first, last });
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
    const items = this.rows.slice(first, last).map((row, number) => this.#row(row, first + number));
    if (items.length && !items.some((item) => item.tabIndex === 0)) items[0].tabIndex = 0;
    this.sheet.replaceChildren(lines(this, first, last), ...items);
    if (focused !== undefined) (this.#item(focused) ?? this.#item(this.current) ?? items[0])?.focus({ preventScroll: true });
  }

  #item(id) {
    return this.sheet.querySelector(`[data-id="${CSS.escape(id ?? "")}"]`);
  }

  /** Scroll as little as shows a row. */
  #reveal(number) {
    const [top, seen] = [number * this.height, this.element];
    if (top < seen.scrollTop) seen.scrollTop = top;
    else if (top + this.height > seen.scrollTop + seen.clientHeight) seen.scrollTop = top + this.height - seen.clientHeight;
  }

  #row({ id, lane, level, place, beside }, number) {
    const { forest, current } = this;
    const session = forest.nodes.get(id);
    const { told, written } = session ? label(session) : forest.pending.label;
    const line = [part("told", told), told && written ? " " : "", part("written", written || (told ? "" : "(empty)"))];
    const learns = session?.learns ? [part("learns", "learns")] : [];
    const item = make("div", "", [part("line", line), ...learns, part("count", session ? compact(session.tokens) : "…")]);
    const said = { role: "treeitem", "aria-level": level, "aria-posinset": place, "aria-setsize": beside };
    for (const [name, value] of Object.entries({ ...said, "aria-selected": id === current })) item.setAttribute(name, value);
    item.tabIndex = id === current ? 0 : -1;
    item.dataset.id = id;
    item.style.top = `${number * this.height}px`;
    item.style.paddingLeft = `${(lane + 1) * LANE + 10}px`;
    if (session) item.title = `${session.tokens.toLocaleString("en")} tokens, ${when(session.created)}`;
    else item.classList.add("pending");
    return item;
  }

  #move(event, choose) {
    const at = this.numbers.get(document.activeElement.dataset.id);
    if (at === undefined) return;
    const last = this.rows.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(this.rows[at].id);
    else if (to !== undefined) {
      const number = Math.max(0, Math.min(to, last));
      this.#reveal(number);
      this.#draw();
      this.#item(this.rows[number].id)?.focus({ preventScroll: true });
    } else return;
    event.preventDefault();
  }
}

const part = (name, content) => make("span", name, content);

const compact = (count) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(count);

function when(seconds) {
  return new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** The lines between the rows in view, and a dot at each row. */
function lines({ rows, numbers, onPath, height }, first, last) {
  const [top, bottom] = [first * height, last * height];
  const place = (number) => [(rows[number].lane + 1) * LANE, (number + 0.5) * height - top];
  const svg = makeSvg("svg", { "aria-hidden": true, height: bottom - top, width: (LANES + 2) * LANE });
  svg.style.top = `${top}px`;
  const draw = (name, attributes) => svg.append(makeSvg(name, attributes));
  const state = (id) => (onPath.has(id) ? "on" : "off");
  const crossing = rows.filter(({ parent }, number) => number >= first && numbers.get(parent) < last);
  for (const { id, parent } of crossing.sort((one, other) => onPath.has(one.id) - onPath.has(other.id))) {
    const [[x, y], [fromX, fromY]] = [place(numbers.get(id)), place(numbers.get(parent))];
    const bend = Math.min(10, height / 2);
    const d = x === fromX ? `M${x} ${fromY}V${y}` : `M${fromX} ${fromY}V${y - bend}Q${fromX} ${y} ${x} ${y}`;
    draw("path", { d, class: state(id) });
  }
  for (let number = first; number < last; number++) {
    const [cx, cy] = place(number);
    const { id } = rows[number];
    draw("circle", { cx, cy, r: onPath.has(id) ? 4.5 : 3.5, class: state(id) });
  }
  return svg;
}
