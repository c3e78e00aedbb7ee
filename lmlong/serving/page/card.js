// The card of a token: its surprisal and its alternatives.

import { make } from "./dom.js";
import { bits, isText, visible } from "./tokens.js";

const LEAVE = 250; // milliseconds in which a pointer may go from the token into its card

export class Card {
  /**
   * @param element the card
   * @param view    the TextView whose tokens it tells of
   * @param take    called with (place, name) to continue with an alternative
   * @param say     called with what a reader who does not see the card is to hear
   */
  constructor(element, view, take, say) {
    Object.assign(this, { element, view, take, say, token: null, isPinned: false, timer: 0 });
    const text = view.element;
    text.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.#over(event.target));
    text.addEventListener("pointerout", (event) => event.pointerType === "mouse" && this.#leaving());
    text.addEventListener("click", (event) => this.#pin(event.target.closest(".token")));
    text.addEventListener("keydown", (event) => this.#move(event));
    text.parentElement.addEventListener("scroll", () => (this.isPinned ? this.#follow() : this.hide()), { passive: true });
    element.addEventListener("pointerenter", () => clearTimeout(this.timer));
    element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.#leaving());
    document.addEventListener("pointerdown", (event) => {
      if (!element.contains(event.target) && !event.target.closest?.(".token")) this.hide();
    });
  }

  get isOpen() {
    return !this.element.hidden;
  }

  hide() {
    clearTimeout(this.timer);
    const hadFocus = this.element.contains(document.activeElement);
    this.token?.classList.remove("chosen");
    this.token = null;
    this.isPinned = false;
    this.element.hidden = true;
    if (hadFocus) this.view.element.focus();
  }

  #over(target) {
    const token = target.closest(".token");
    if (token && !this.isPinned) this.show(token);
  }

  #leaving() {
    clearTimeout(this.timer);
    if (!this.isPinned) this.timer = setTimeout(() => this.hide(), LEAVE);
  }

  #pin(token) {
    if (!token) return;
    this.show(token);
    this.isPinned = true;
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && this.isOpen) this.element.querySelector("button:not(:disabled)")?.focus();
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const spans = this.view.spans;
    const at = spans.indexOf(this.token);
    const to = at < 0 ? (step > 0 ? 0 : spans.length - 1) : at + step;
    if (!spans[to]) return;
    event.preventDefault();
    spans[to].scrollIntoView({ block: "nearest" });
    this.#pin(spans[to]);
    this.say(spoken(this.view.places.get(spans[to]).token));
  }

  show(span) {
    clearTimeout(this.timer);
    const place = this.view.places.get(span);
    if (place.token.logprob === null) return;
    this.token?.classList.remove("chosen");
    this.token = span;
    span.classList.add("chosen");
    this.element.replaceChildren(...this.#content(place));
    this.element.hidden = false;
    this.#beside(span);
  }

  #content(place) {
    const { token } = place;
    const name = (token.head ?? "") + token.text;
    const head = make("p", "", [make("b", "", visible(name)), ` ${surprise(token)}`]);
    const rows = token.others.map(([other, logprob]) => this.#row(place, other, logprob, other === name));
    if (token.others.length && !token.others.some(([other]) => other === name)) {
      rows.push(this.#row(place, name, token.logprob, true));
    }
    const hint = rows.length ? [make("p", "small", "Choose another token to fork here.")] : [];
    return [head, make("div", "rows", rows), ...hint];
  }

  #row(place, name, logprob, isWritten) {
    const share = Math.exp(logprob);
    const bar = make("span", "share");
    bar.style.width = `${100 * share}%`;
    const cells = [bar, make("span", "name", visible(name)), make("span", "percent", percent(share))];
    const row = make("button", isWritten ? "written" : "", cells);
    const fits = isText(name) && name.startsWith(place.token.head ?? "");
    row.disabled = isWritten || !fits;
    row.addEventListener("click", () => this.take(place, name, logprob));
    return row;
  }

  /** Stay beside the token while it can be seen. */
  #follow() {
    const { top, bottom } = this.token.getBoundingClientRect();
    const seen = this.view.scroller.getBoundingClientRect();
    if (bottom > seen.top && top < seen.bottom) this.#beside(this.token);
    else this.hide();
  }

  /** Put the card under its token, or above it where there is no room. */
  #beside(span) {
    const { left, top, bottom } = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const page = document.documentElement;
    const below = bottom + 6 + height < page.clientHeight;
    this.element.style.left = `${Math.max(8, Math.min(left, page.clientWidth - width - 8))}px`;
    this.element.style.top = `${Math.max(8, below ? bottom + 6 : top - height - 6)}px`;
  }
}

const surprise = ({ logprob }) => `${bits(logprob).toFixed(1)} bits, ${percent(Math.exp(logprob))}`;

function spoken(token) {
  if (token.logprob === null) return token.text;
  const others = token.others.slice(0, 3).map(([name, logprob]) => `${visible(name)} ${percent(Math.exp(logprob))}`);
  return `${visible(token.text)}: ${surprise(token)}. Likeliest: ${others.join(", ")}.`;
}

function percent(share) {
  if (share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}
