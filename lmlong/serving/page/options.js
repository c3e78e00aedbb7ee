// The options on the page, which the browser remembers: of sampling, of the text's look, and whether to learn.

import { element } from "./dom.js";

const KEY = "lmlong.options";
const fields = [...document.querySelectorAll("input[name]")];
const numbers = fields.filter(({ type }) => type === "number");
const learn = element("learn");
const chosen = JSON.parse(localStorage.getItem(KEY) ?? "{}"); // {name: value}

const remember = () => localStorage.setItem(KEY, JSON.stringify(chosen));

/** {name: value} of the sampling options that are set, and `learn`; null if one is invalid, which is then shown. */
export function readOptions() {
  const wrong = numbers.find((field) => !field.checkValidity());
  if (wrong) {
    element("sampling").open = true;
    wrong.reportValidity();
    return null;
  }
  const set = numbers.filter((field) => field.value !== "");
  const values = Object.fromEntries(set.map((field) => [field.name, field.valueAsNumber]));
  return learn.checked ? { ...values, learn: true } : values;
}

/** Show the options, of which those that nobody has chosen are the model's. A text that learns cannot stop. */
export function showOptions(model, isLearning) {
  element("colours").checked = chosen.colours ?? true;
  learn.checked = isLearning || (chosen.learn ?? model.learns);
  learn.disabled = isLearning;
  document.body.classList.toggle("plain", !element("colours").checked);
  document.body.classList.toggle("mono", model.writes === "code");
  const changed = numbers.filter((field) => field.value !== field.defaultValue);
  const names = changed.map(({ labels, value }) => `${labels[0].firstChild.textContent.trim()} ${value || "any"}`);
  element("summary").textContent = ["Sampling", ...names].join(" · ");
}

/** Remember each change, and call `changed` after it. */
export function watchOptions(changed) {
  for (const field of numbers) field.value = chosen[field.name] ?? field.defaultValue;
  for (const field of fields) {
    field.addEventListener("input", () => {
      chosen[field.name] = field.type === "checkbox" ? field.checked : field.value;
      remember();
      changed();
    });
  }
  element("defaults").addEventListener("click", () => {
    for (const field of numbers) {
      field.value = field.defaultValue;
      delete chosen[field.name];
    }
    remember();
    changed();
  });
}
