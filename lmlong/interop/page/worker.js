// The model, in a worker: each message is a command, whose answer is its result or an error.

import { Model } from "./model.js";

const EACH = 100; // milliseconds between what is shown
let model;
let isStopped = false;

/** Send tokens as they come, until there are no more or the page asks to stop. */
async function send(tokens) {
  let [shown, number] = [[], 0];
  let next = performance.now() + EACH;
  const begun = performance.now();
  for (const token of tokens) {
    shown.push(token);
    number++;
    if (performance.now() < next) continue;
    postMessage({ tokens: shown.splice(0) });
    await new Promise((resolve) => setTimeout(resolve)); // a command to stop may arrive
    next = performance.now() + EACH;
    if (isStopped) break;
  }
  postMessage({ tokens: shown });
  return { number, seconds: (performance.now() - begun) / 1000 };
}

const commands = {
  async load({ about, wasm, weights }) {
    model = await Model.load(about, wasm, weights);
  },
  async run({ prompt, options }) {
    isStopped = false;
    const read = await send(model.read(prompt));
    return options && !isStopped ? send(model.write(options)) : read;
  },
  reset: () => model.reset(),
  save: () => model.save(),
  async restore({ file }) {
    await model.restore(file);
    return { tail: model.tail, total: model.total };
  },
};

onmessage = async ({ data }) => {
  if (data.command === "stop") return (isStopped = true);
  try {
    postMessage({ result: await commands[data.command](data), total: model.total });
  } catch (error) {
    const hasNoSimd = error instanceof WebAssembly.CompileError;
    postMessage({ error: hasNoSimd ? "This browser has no SIMD in WebAssembly, which the model needs." : error.message });
  }
};
