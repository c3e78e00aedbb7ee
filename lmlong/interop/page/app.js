// The page: it shows the text, and asks the worker to read, write, save and restore it.

import { element, make, say } from "../../serving/page/dom.js";
import { bits, surprise } from "../../serving/page/tokens.js";

const NEAR = 80; // pixels from the end within which the view follows what is written
const parts = (name) => [...document.querySelectorAll(`script.${name}`)];
const content = (name) => parts(name).map((part) => part.textContent);
const about = JSON.parse(content("about")[0]);
const worker = new Worker(URL.createObjectURL(new Blob(content("worker"), { type: "text/javascript" })));
const fields = [...document.querySelectorAll("input[type=number]")];
const buttons = ["write", "read", "new", "save", "open"].map(element);
let answer; // takes the result of the command that runs
let scored = { nats: 0, bytes: 0 };

/** Run a command of the worker, and show what is wrong with it. Return its result, or undefined. */
async function run(command, values = {}, transfer = []) {
  buttons.forEach((button) => (button.disabled = true));
  element("stop").hidden = command !== "run";
  worker.postMessage({ command, ...values }, transfer);
  const { result, total, error } = await new Promise((resolve) => (answer = resolve));
  element("stop").hidden = true;
  say(error ?? "", Boolean(error));
  if (command === "load" && error) return undefined;
  buttons.forEach((button) => (button.disabled = false));
  if (total) element("text-size").textContent = `${(total - 1).toLocaleString("en")} tokens`;
  return error ? undefined : result ?? true;
}

worker.onmessage = ({ data }) => (data.tokens ? show(data.tokens) : answer(data));
worker.onerror = ({ message }) => answer({ error: message });

function show(tokens) {
  const scroller = element("scroll");
  const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
  element("text").append(...tokens.map(({ text, nats }) => {
    const span = make("span", `token b${Math.min(10, Math.round(bits(-nats)))}`, text);
    span.title = surprise({ logprob: -nats });
    scored.nats += nats;
    scored.bytes += new TextEncoder().encode(text).length;
    return span;
  }));
  if (isNear) scroller.scrollTop = scroller.scrollHeight;
}

/** Read the prompt, and with `options` continue it. */
async function go(options) {
  const prompt = element("prompt").value;
  element("prompt").value = "";
  scored = { nats: 0, bytes: 0 };
  const result = await run("run", { prompt, options });
  if (result) {
    const speed = result.seconds ? Math.round(result.number / result.seconds).toLocaleString("en") : 0;
    const perByte = scored.bytes ? `, ${(scored.nats / Math.LN2 / scored.bytes).toFixed(3)} bits per byte` : "";
    say(`${result.number.toLocaleString("en")} tokens, ${speed} tokens/s${perByte}`);
  }
  element("prompt").focus();
}

function options() {
  const wrong = fields.find((field) => !field.checkValidity());
  wrong?.reportValidity();
  if (wrong) return null;
  const [maxTokens, temperature, seed] = fields.map(({ valueAsNumber }) => valueAsNumber);
  return { maxTokens, temperature, seed: Number.isNaN(seed) ? Math.floor(Math.random() * 2 ** 32) : seed };
}

function write() {
  const chosen = element("write").disabled ? null : options();
  if (chosen) go(chosen);
}

async function save() {
  const file = await run("save");
  if (!file) return;
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([file]));
  link.download = `${about.run}.state`;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function open([file]) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const state = await run("restore", { file: bytes }, [bytes.buffer]);
  if (state) element("text").replaceChildren(make("span", "given", `… ${state.tail}`));
}

async function restart() {
  if (await run("reset")) element("text").replaceChildren();
}

const stop = () => worker.postMessage({ command: "stop" });
const handlers = { read: () => go(null), new: restart, save, stop, open: () => element("file").click() };
for (const [id, handler] of Object.entries(handlers)) element(id).addEventListener("click", handler);
element("file").addEventListener("change", ({ target }) => open(target.files).finally(() => (target.value = "")));
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== element("prompt")) return;
  event.preventDefault();
  write();
});

document.title = element("model").textContent = about.run;
const begun = performance.now();
const isLoaded = await run("load", { about, wasm: content("wasm")[0], weights: content("weights") });
parts("weights").forEach((part) => part.remove());
if (isLoaded) say(`${about.description}, loaded in ${((performance.now() - begun) / 1000).toFixed(1)} s`);
