// The tree of sessions: consecutive turns are drawn downwards, and forks branch to the right.

import { make, makeSvg } from "./dom.js";
import { children, parentOf, pathTo, sessions } from "./sessions.js";

const LANE = 14; // pixels from one line to the next
const LANES = 9;
const BESIDE = 100; // rows that are made above and below those in view

/**
 * Rows from top to bottom: {id, parent, lane, level, and its place among those beside it}. The first that follows a
 * session stays on its line, below the others.
 */
function rowsOfTree() {
  const following = children();
  const rows = [];
  const below = (id) => following.get(id) ?? [];
  const beside = below(null).length;
  const waiting = below(null).map((id, number) => ({ id, lane: 0, level: 1, place: beside - number, beside }));
  while (waiting.length) {
    const row = waiting.pop();
    rows.push({ ...row, parent: parentOf(sessions.get(row.id)) });
    const [first, ...others] = below(row.id);
    const beside = others.length + 1;
    const level = row.level + 1;
    if (first !== undefined) waiting.push({ id: first, lane: row.lane, level, place: beside, beside });
    others.reverse().forEach((id, number) => {
      waiting.push({ id, lane: Math.min(row.lane + 1, LANES), level, place: others.length - number, beside });
    });
  }
  return rows;
}

/** Shows the tree in an element, which makes its visible rows alone; `choose` gets the id of the selected one. */
export class TreeView {
  constructor(element, choose) {
    Object.assign(this, { element, choose, rows: [], height: 34, sheet: make("div") });
    this.sheet.setAttribute("role", "none");
    element.append(this.sheet);
    element.addEventListener("click", (event) => {
      const row = event.target.closest("[data-id]");
      if (row) choose(row.dataset.id);
    });
    element.addEventListener("keydown", (event) => this.#move(event));
    element.addEventListener("scroll", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(element);
  }

  show(current) {
    this.current = current;
    this.rows = rowsOfTree();
    this.numbers = new Map(this.rows.map(({ id }, number) => [id, number]));
    this.onPath = new Set(pathTo(current).map(({ id }) => id));
    this.height = matchMedia("(max-width: 760px)").matches ? 44 : 34;
    this.sheet.style.height = `${this.rows.length * this.height}px`;
    this.#reveal(this.numbers.get(current));
    this.#draw();
  }

  /** Make the rows in view, and some beside them. */
  #draw() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - BESIDE);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / this.height) + BESIDE);
    const focused = this.element.contains(document.activeElement) && document.activeElement.dataset.id;
    const items = this.rows.slice(first, last).map((row, number) => this.#row(row, first + number));
    if (items.length && !items.some((item) => item.tabIndex === 0)) items[0].tabIndex = 0;
    this.sheet.replaceChildren(this.#lines(first, last), ...items);
    if (focused) this.#focus(focused);
  }

  #focus(id) {
    this.sheet.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus({ preventScroll: true });
  }

  /** Scroll as little as shows a row. */
  #reveal(number) {
    if (number === undefined) return;
    const seen = this.element;
    const top = number * this.height;
    seen.scrollTop = Math.max(Math.min(seen.scrollTop, top), top + this.height - seen.clientHeight);
  }

  #row({ id, lane, level, place, beside }, number) {
    const session = sessions.get(id);
    const given = session.given.trimStart();
    const written = session.written.trim() ? session.written : given ? "" : `… ${session.tail.slice(-60)}`;
    const shortened = given.length > 28 && written ? `${given.slice(0, 27)}… ` : given;
    const line = make("span", "line", [make("span", "given", shortened), make("span", "written", written)]);
    const learns = session.learns ? [make("span", "learns", "learns")] : [];
    const item = make("div", session.pending ? "pending" : "", [line, ...learns]);
    item.append(make("span", "count", session.pending ? "…" : compact.format(session.tokens)));
    const said = { level, posinset: place, setsize: beside, selected: id === this.current };
    for (const [name, value] of Object.entries(said)) item.setAttribute(`aria-${name}`, value);
    item.setAttribute("role", "treeitem");
    item.tabIndex = id === this.current ? 0 : -1;
    item.dataset.id = id;
    item.style.top = `${number * this.height}px`;
    item.style.paddingLeft = `${(lane + 1) * LANE + 10}px`;
    item.title = `${session.tokens.toLocaleString("en")} tokens, ${new Date(1000 * session.created).toLocaleString()}`;
    return item;
  }

  #move(event) {
    const at = this.numbers.get(document.activeElement.dataset.id);
    const last = this.rows.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    const isChosen = event.key === "Enter" || event.key === " ";
    if (at === undefined || (to === undefined && !isChosen)) return;
    event.preventDefault();
    if (isChosen) return this.choose(this.rows[at].id);
    const number = Math.max(0, Math.min(to, last));
    this.#reveal(number);
    this.#draw();
    this.#focus(this.rows[number].id);
  }

  /** The lines between the rows in view, and a dot at each row. */
  #lines(first, last) {
    const { rows, numbers, onPath, height } = this;
    const top = first * height;
    const svg = makeSvg("svg", { "aria-hidden": true, height: (last - first) * height, width: (LANES + 2) * LANE });
    svg.style.top = `${top}px`;
    const place = (number) => [(rows[number].lane + 1) * LANE, (number + 0.5) * height - top];
    const state = (id) => (onPath.has(id) ? "on" : "");
    const draw = (name, attributes, id) => svg.append(makeSvg(name, { ...attributes, class: state(id) }));
    const crossing = rows.filter(({ parent }, number) => parent && number >= first && numbers.get(parent) < last);
    for (const { id, parent } of crossing.sort((one, other) => onPath.has(one.id) - onPath.has(other.id))) {
      const [[x, y], [fromX, fromY]] = [place(numbers.get(id)), place(numbers.get(parent))];
      const bend = Math.min(10, height / 2);
      const d = x === fromX ? `M${x} ${fromY}V${y}` : `M${fromX} ${fromY}V${y - bend}Q${fromX} ${y} ${x} ${y}`;
      draw("path", { d }, id);
    }
    for (let number = first; number < last; number++) {
      const [cx, cy] = place(number);
      draw("circle", { cx, cy, r: onPath.has(rows[number].id) ? 4.5 : 3.5 }, rows[number].id);
    }
    return svg;
  }
}

const compact = Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
