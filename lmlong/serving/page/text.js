// The text from the first turn to the selected one; the colour of a generated token shows its surprisal.

import { make } from "./dom.js";
import { bits, surprise } from "./tokens.js";

const NEAR = 80; // pixels from the end within which the view follows what is generated
const BEFORE_STATE = "The text before is in the uploaded state, which does not store it. ";

export class TextView {
  constructor(element) {
    this.element = element;
    this.scroller = element.parentElement;
    this.places = new WeakMap(); // of each token's span: {id, passage, number, token}
  }

  /**
   * Show turns, from their last `most` characters on.
   * @param turns       [{id, passages}]
   * @param isWriting   whether the last turn grows
   * @param showEarlier shows the earlier text; null if all of it is shown
   */
  show(turns, isWriting, most, showEarlier) {
    const parts = turns.map(({ id, passages }) => {
      return make("span", "turn", passages.map((passage) => this.#passage(id, passage, most)));
    });
    if (showEarlier) {
      const button = make("button", "quiet", "Show earlier text");
      button.addEventListener("click", showEarlier);
      parts.unshift(make("p", "earlier", button));
    }
    this.element.replaceChildren(...parts);
    this.element.classList.toggle("writing", isWriting);
    this.toEnd();
  }

  #passage(id, passage, most) {
    const { by, text, tokens } = passage;
    if (tokens) return make("span", "", tokens.map((token, number) => this.#token({ id, passage, number, token })));
    const given = make("span", "given", text.slice(-most));
    return by === "state" ? make("span", "", [make("span", "hint", BEFORE_STATE), given]) : given;
  }

  #token(place) {
    const { text, logprob } = place.token;
    if (logprob === null) return make("span", "", text);
    const span = make("span", `token b${Math.min(10, Math.round(bits(logprob)))}`, text);
    span.title = surprise(place.token);
    this.places.set(span, place);
    return span;
  }

  /** Append tokens to the last turn, from a number on. */
  append(id, passage, from) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const tokens = passage.tokens.slice(from);
    const spans = tokens.map((token, number) => this.#token({ id, passage, number: from + number, token }));
    this.element.lastElementChild.append(...spans);
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.toEnd();
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
