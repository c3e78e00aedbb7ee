// What a page's model does, for the tests in test_page_export.py: the file of commands, the module.

import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [commands, module] = process.argv.slice(2);
const { Model, load } = await import(pathToFileURL(module));
const { Sampler } = await import(pathToFileURL(module.replace("model.js", "sampling.js")));
const { Tokenizer } = await import(pathToFileURL(module.replace("model.js", "tokenizer.js")));
const { logits, tokenizers, samplers, page, state } = JSON.parse(await readFile(commands, "utf8"));
const base64 = (bytes) => Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("base64");
const result = {};

if (logits) {
  result.logits = [];
  for (const { about, wasm, weights, tokens } of logits) {
    const { engine } = await Model.load(about, wasm, [weights]);
    for (const token of tokens.slice(0, 5)) engine.read(token), engine.advance();
    engine.reset();
    result.logits.push(tokens.map((token) => {
      const found = base64(engine.read(token));
      engine.read((token + 1) % about.image.vocabulary); // a token that is taken back
      engine.read(token);
      engine.advance();
      return found;
    }));
  }
}
if (tokenizers) {
  result.tokens = tokenizers.map(({ spec, texts }) => texts.map((text) => new Tokenizer(spec).encode(text)));
}
if (samplers) {
  result.drawn = samplers.map(({ options, random, logits }) => {
    const sampler = new Sampler({ ...options, random: () => random.shift() });
    return logits.map((each) => sampler.sample(Float32Array.from(each)));
  });
}
if (page) {
  const model = await load(await readFile(page, "utf8"));
  for (const _ of model.generate("def main", { maxTokens: 50, temperature: 0 }));
  result.saved = base64(await model.save());
  result.written = [...model.write({ maxTokens: 40, temperature: 0 })].map(({ text }) => text).join("");
  const { tokens, bitsPerByte } = model.score("def a text of some length");
  Object.assign(result, { text: tokens.map(({ text }) => text).join(""), bitsPerByte });
  for (const _ of model.read("cab dab ".repeat(700))); // fills tables, of which nothing must stay
  await model.restore(await readFile(state));
  result.again = base64(await model.save());
  result.restored = [...model.write({ maxTokens: 40, temperature: 0 })].map(({ text }) => text).join("");
  const damaged = await readFile(state);
  damaged[damaged.length - 1] ^= 1;
  result.refused = await model.restore(damaged).catch((error) => error.message);
}
process.stdout.write(JSON.stringify(result));
