// Read a text in llama.cpp and decode after some lengths: node llama_cpp.mjs WORK.json
// Prints a JSON object a line: first what runs, then the seconds of each length.
import fs from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const work = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const entry = join(work.packages, "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry));

const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: work.model});
// no flash attention: on CPUs it decodes more slowly after long texts
const context = await model.createContext({
    contextSize: work.tokens.length, threads: 1, batchSize: 512, flashAttention: false,
});
const sequence = context.getSequence({checkpoints: {max: 0}});
const maps = fs.existsSync("/proc/self/maps") ? fs.readFileSync("/proc/self/maps", "utf8") : "";
const library = maps.match(/libggml-cpu[\w-]*\.so/)?.[0] ?? "unknown";
print({version: llama.llamaCppRelease.release, library, instructions: llama.systemInfo.trim()});

let done = 0;
for (const length of work.lengths) {
    let begun = clock();
    await sequence.evaluateWithoutGeneratingNewTokens(work.tokens.slice(done, length - 1));
    const prefill = since(begun), read = length - 1 - done;
    const steps = sequence.evaluate([work.tokens[length - 1]], {temperature: 0, yieldEogToken: true});
    const predicted = [];
    begun = clock();
    for (let at = length; at < length + work.decoded; at++) {
        const step = await (at === length ? steps.next() : steps.next(work.tokens[at - 1]));
        predicted.push(step.value);
    }
    const decode = since(begun);
    await steps.return();
    done = length + work.decoded - 1;
    if (sequence.nextTokenIndex !== done) throw new Error(`at ${sequence.nextTokenIndex}, not ${done}`);
    print({length, read, prefill, decode, predicted});
}
process.exit(0);

function clock() {
    const {user, system} = process.cpuUsage();
    return {cpu: (user + system) / 1e6, wall: performance.now() / 1e3};
}

function since(begun) {
    const now = clock();
    return {cpu: now.cpu - begun.cpu, wall: now.wall - begun.wall};
}

function print(value) {
    fs.writeSync(1, JSON.stringify(value) + "\n");
}
