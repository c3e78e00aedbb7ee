// Finding and making elements, and the status line.

const SVG = "http://www.w3.org/2000/svg";

export const element = (id) => document.getElementById(id);

/** Make an element of a class; its content is a text, an element, or a list of them. */
export function make(name, className = "", content = []) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...[content].flat());
  return made;
}

export function makeSvg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Show a message in the status line, which screen readers announce. */
export function say(text, isError = false) {
  const status = element("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}
