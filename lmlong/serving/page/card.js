// The card of a token: its surprisal and its alternatives.

import { make, say } from "./dom.js";
import { isText, percent, surprise, visible } from "./tokens.js";

export class Card {
  /**
   * @param element a popover
   * @param view    the TextView whose tokens it is about
   * @param take    called with (place, name) to continue with an alternative
   */
  constructor(element, view, take) {
    Object.assign(this, { element, view, take, span: null });
    view.element.addEventListener("click", ({ target }) => this.#show(target.closest(".token")));
    view.element.addEventListener("keydown", (event) => this.#move(event));
    view.scroller.addEventListener("scroll", () => this.isOpen && this.#place());
    element.addEventListener("toggle", () => this.span?.classList.toggle("chosen", this.isOpen));
  }

  get isOpen() {
    return this.element.matches(":popover-open");
  }

  hide() {
    this.element.hidePopover();
  }

  /** Go from token to token by the arrow keys, and into the card by Enter. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && this.isOpen) this.element.querySelector("button:enabled")?.focus();
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const spans = [...this.view.element.querySelectorAll(".token")];
    const at = spans.indexOf(this.span);
    const span = at < 0 ? spans.at(step > 0 ? 0 : -1) : spans[at + step];
    if (!span) return;
    event.preventDefault();
    span.scrollIntoView({ block: "nearest" });
    this.#show(span);
    const { token } = this.view.places.get(span);
    const others = token.others.slice(0, 3).map(([name, logprob]) => `${visible(name)} ${percent(Math.exp(logprob))}`);
    say(`${visible(token.text)}: ${surprise(token)}. Likeliest: ${others.join(", ")}.`);
  }

  #show(span) {
    if (!span) return;
    this.span?.classList.remove("chosen");
    this.span = span;
    span.classList.add("chosen");
    const place = this.view.places.get(span);
    const { token } = place;
    const name = (token.head ?? "") + token.text;
    const rows = token.others.map(([other, logprob]) => this.#row(place, other, logprob, other === name));
    if (rows.length && !token.others.some(([other]) => other === name)) {
      rows.push(this.#row(place, name, token.logprob, true));
    }
    this.element.replaceChildren(make("p", "", [make("b", "", visible(name)), ` ${surprise(token)}`]), ...rows);
    if (rows.length) this.element.append(make("p", "small", "Choose another token to fork here."));
    this.element.showPopover();
    this.#place();
  }

  #row(place, name, logprob, isWritten) {
    const share = Math.exp(logprob);
    const bar = make("span", "share");
    bar.style.width = `${100 * share}%`;
    const cells = [bar, make("span", "name", visible(name)), make("span", "percent", percent(share))];
    const row = make("button", isWritten ? "written" : "", cells);
    const { head = "" } = place.token;
    row.disabled = isWritten || !isText(name) || !name.startsWith(head);
    row.addEventListener("click", () => this.take(place, name.slice(head.length)));
    return row;
  }

  /** Put the card under its token, or above it where there is no room. */
  #place() {
    const { left, top, bottom } = this.span.getClientRects()[0] ?? this.span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const { clientWidth, clientHeight } = document.documentElement;
    const below = bottom + 6 + height < clientHeight;
    this.element.style.left = `${Math.max(8, Math.min(left, clientWidth - width - 8))}px`;
    this.element.style.top = `${Math.max(8, below ? bottom + 6 : top - height - 6)}px`;
  }
}
