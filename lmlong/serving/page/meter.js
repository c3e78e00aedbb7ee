// The meter: the length of the text and the size of its state.

import { ask } from "./api.js";
import { element, makeSvg } from "./dom.js";

const EDGE = 4; // pixels that stay free for the dot
const MOST = 60; // dots

/**
 * A function from a number of tokens to the bytes of a state in memory, from the server's metrics, or null without
 * them. The file of a session is smaller if parts of its state are empty.
 */
export async function stateSizes() {
  const told = await ask("metrics").then((answer) => answer.text()).catch(() => "");
  const value = (name) => Number(told.match(new RegExp(`^${name} (\\S+)$`, "m"))?.[1] ?? NaN);
  const [bytes, more] = [value("lmlong_row_state_bytes"), value("lmlong_row_state_bytes_per_token")];
  return Number.isNaN(bytes + more) ? null : (tokens) => bytes + more * tokens;
}

/**
 * @param all    [{tokens, bytes}] of the turns so far; the last is the current one
 * @param most   tokens at the right end, while more are being generated
 * @param rate   tokens per second, if any were generated
 */
export function show(all, most, rate) {
  const points = all.filter((_, number) => number === all.length - 1 || number % Math.ceil(all.length / MOST) === 0);
  const now = points.at(-1);
  element("text-size").textContent = now ? `${now.tokens.toLocaleString("en")} tokens` : "–";
  element("state-size").textContent = now ? inBytes(now.bytes) : "–";
  const end = Math.max(most, 1);
  const largest = Math.max(...points.map((point) => point.bytes), 1);
  const tokens = points.map((point) => point.tokens / end);
  const bytes = points.map((point) => (0.6 * point.bytes) / largest);
  draw("text-line", tokens, tokens, 0);
  draw("state-line", tokens, bytes, bytes[0]); // the state of no token is as large
  element("verdict").textContent = [verdict(points), rate ? `${Math.round(rate).toLocaleString("en")} tokens/s` : ""].filter(Boolean).join(" · ");
}

/** Draw points, given as shares of the width and height, from left to right with a dot at each. */
function draw(id, across, up, from) {
  const svg = element(id);
  const { clientWidth: width, clientHeight: height } = svg;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const place = (x, y) => [EDGE + (width - 2 * EDGE) * x, height - EDGE - (height - 2 * EDGE) * y];
  const places = across.map((x, number) => place(x, up[number]));
  const corners = places.length ? [place(0, from), ...places] : [];
  const line = makeSvg("polyline", { points: corners.map((corner) => corner.join(",")).join(" ") });
  const dots = places.map(([cx, cy], number) => makeSvg("circle", { cx, cy, r: number === places.length - 1 ? 3.5 : 1.5 }));
  svg.replaceChildren(line, ...dots);
}

function verdict(points) {
  const first = points.find((point) => point.tokens > 1);
  const last = points.at(-1);
  if (!first) return "";
  if (last.tokens < 1.1 * first.tokens) return `${inBytes(last.bytes / last.tokens)} of state per token`;
  const [text, state] = [last.tokens / first.tokens, last.bytes / first.bytes].map(times);
  return `${text}× the text, ${state === "1.0" ? "same" : `${state}×`} state`;
}

const times = (factor) => factor.toFixed(factor < 9.95 ? 1 : 0);

export function inBytes(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
