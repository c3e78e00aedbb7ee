// The sampling options and whether to learn from a text, stored in this browser.

import { element } from "./dom.js";
import { read, store } from "./storage.js";

const KEY = "lmlong.options";
const LEARN = "lmlong.learn";
const fields = [...document.querySelectorAll("#sampling input")];

/** {name: value} of the options that are set, or null if one is invalid, which is then shown. */
export function readOptions() {
  const wrong = fields.find((field) => !field.checkValidity());
  if (wrong) {
    element("sampling").open = true;
    wrong.reportValidity();
    return null;
  }
  const set = fields.filter((field) => field.value !== "");
  const values = Object.fromEntries(set.map((field) => [field.name, field.valueAsNumber]));
  return learns() ? { ...values, learn: true } : values;
}

const learn = element("learn");
let chosen = read(LEARN);

/** Whether to learn from the text that is read next. */
export const learns = () => learn.checked;

/** Show the choice for new texts, by default that of the server; or of a text that learns already, which cannot stop. */
export function showLearning(isLearning, byDefault) {
  learn.disabled = isLearning;
  learn.checked = isLearning || (chosen ?? byDefault);
}

learn.addEventListener("change", () => {
  chosen = learn.checked;
  store(LEARN, JSON.stringify(chosen));
});

function change() {
  store(KEY, JSON.stringify(Object.fromEntries(fields.map((field) => [field.name, field.value]))));
  tell();
}

/** List the changed options beside the closed list. */
function tell() {
  const changed = fields.filter((field) => field.value !== field.defaultValue);
  const names = changed.map((field) => `${field.labels[0].firstChild.textContent.trim().toLowerCase()} ${field.value || "any"}`);
  document.querySelector("#sampling summary").textContent = ["Sampling", ...names].join(" · ");
}

const kept = read(KEY) ?? {};
for (const field of fields) {
  field.value = kept[field.name] ?? field.defaultValue;
  field.addEventListener("input", change);
}
element("defaults").addEventListener("click", () => {
  for (const field of fields) field.value = field.defaultValue;
  change();
});
tell();
