// The text from the first turn to the selected one; the color of a generated token shows its surprisal.

import { make } from "./dom.js";
import { bits, textOf } from "./tokens.js";
import * as texts from "./texts.js";

const NEAR = 80; // pixels from the end within which the view follows what is written
const SHOWN = 40_000; // characters from the end that are shown at first
const SOFT = 4; // tokens at once that appear softly; a fast model would never be seen

export class TextView {
  /**
   * @param element where the text stands
   * @param goBack  called with the id of a turn whose end somebody chose in the text
   */
  constructor(element, goBack) {
    this.element = element;
    this.scroller = element.parentElement;
    this.places = new WeakMap(); // of each token's span: {token, id, segment, number}
    this.writing = null; // the part of the turn that is being written, if it is shown,
    this.shown = 0; // and how many of its tokens are
    new ResizeObserver(() => this.#clear()).observe(element);
    element.addEventListener("click", (event) => {
      const mark = event.target.closest(".mark");
      if (mark) goBack(mark.dataset.id);
    });
  }

  /** Show the turns of a path, and the one that is being written after them; say whether that is another text. */
  show(path, turn = null) {
    const key = [...path.map(({ id }) => id), turn?.number].join(" ");
    if (key === this.key) return false;
    const [isEnd, place] = [this.writing && !turn, this.scroller.scrollTop];
    this.key = key;
    const parts = document.createDocumentFragment();
    if (path[0]?.id !== this.root) this.most = SHOWN;
    this.root = path[0]?.id;
    const from = this.#start(path);
    if (from && texts.get(path[from].id)) parts.append(this.#earlier(path, turn));
    path.slice(from).forEach((session, number, shown) => {
      const entry = texts.get(session.id);
      parts.append(entry ? this.#turn(session.id, entry) : this.#end(session));
      if (turn || number < shown.length - 1) parts.append(this.#mark(session));
    });
    this.writing = null;
    if (turn) {
      this.writing = this.#turn(null, turn);
      this.writing.classList.add("writing");
      this.shown = turn.written.length;
      parts.append(this.writing);
    }
    this.element.replaceChildren(parts);
    this.#clear();
    if (isEnd) this.scroller.scrollTop = place; // of a turn that somebody has read along with
    else this.toEnd();
    return true;
  }

  /** The number of the first turn that is shown: long texts begin later, and what this browser does not have is a turn's end. */
  #start(path) {
    let size = 0;
    for (let number = path.length - 1; number >= 0; number--) {
      const entry = texts.get(path[number].id);
      if (!entry) return number;
      size += textOf(entry.segments).length;
      if (size > this.most && number < path.length - 1) return number + 1;
    }
    return 0;
  }

  #earlier(path, turn) {
    const button = make("button", "quiet", "Show earlier text");
    button.addEventListener("click", () => {
      const below = this.scroller.scrollHeight - this.scroller.scrollTop;
      Object.assign(this, { most: 4 * this.most, key: null });
      this.show(path, turn);
      this.scroller.scrollTop = this.scroller.scrollHeight - below;
      this.element.focus();
    });
    return make("p", "earlier", [button]);
  }

  /** Show what the turn that is being written has got since it was shown last. */
  grow({ written }) {
    if (!this.writing || this.shown === written.length) return;
    const isNear = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR;
    const added = span(written.length - this.shown <= SOFT ? "new" : "");
    added.append(...written.slice(this.shown).map((token) => this.#token(token, {})));
    this.writing.append(added);
    this.shown = written.length;
    if (isNear) this.toEnd();
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  get spans() {
    return [...this.element.querySelectorAll(".token")];
  }

  /** The end of a text that this browser never had, or no longer has, as the server tells it. */
  #end(session) {
    const hint = span("hint", "The earlier text is in the state, but this browser does not have it. ");
    return span("turn", [hint, span("told", session.tail)]);
  }

  #turn(id, { segments, name, cut, ended }) {
    const part = span("turn");
    if (name) part.append(span("hint", cut ? `${name}, of which this is the end: ` : `${name}: `));
    segments.forEach(({ told, written }, segment) => {
      if (told !== undefined) part.append(span("told", told));
      else part.append(...written.map((token, number) => this.#token(token, { id, segment, number })));
    });
    if (ended) {
      const end = span("end", "∎");
      end.title = "The model ended the document here.";
      part.append(end);
    }
    return part;
  }

  #token(token, place) {
    const found = span("token", token.text);
    if (token.logprob !== null) found.classList.add(`b${Math.min(10, Math.round(bits(token.logprob)))}`);
    this.places.set(found, { token, ...place });
    return found;
  }

  /** Of the dots of one line show the last alone; the tree has them all. */
  #clear() {
    const marks = [...this.element.querySelectorAll(".mark")];
    for (const mark of marks) mark.hidden = false;
    const tops = marks.map((mark) => mark.offsetTop);
    marks.forEach((mark, number) => (mark.hidden = tops[number] === tops[number + 1]));
  }

  /** A dot between two turns, to go back to the first of them. */
  #mark({ id, tokens }) {
    const mark = make("button", "mark");
    mark.dataset.id = id;
    mark.title = `Return to this point, after ${tokens.toLocaleString("en")} tokens`;
    mark.setAttribute("aria-label", mark.title);
    return mark;
  }
}

const span = (name, content) => make("span", name, content);
