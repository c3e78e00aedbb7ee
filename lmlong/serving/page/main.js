// The page: its events, and the condition of the server.

import { isThere, page, whenBack } from "./api.js";
import * as app from "./app.js";
import { askForKey, pause, tellBack } from "./dialogs.js";
import { element } from "./dom.js";
import { read, store } from "./storage.js";

const LOOK = 15; // seconds between two looks at a server that nothing is asked of

const prompt = element("prompt");

// User events

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  app.write();
});
prompt.addEventListener("input", app.keepDraft);
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey || isSent(event))) {
    event.preventDefault();
    app.write();
  } else if (event.key === "Escape") {
    if (app.card.isOpen) app.card.hide();
    else if (document.body.classList.contains("tree-open")) element("show-tree").click();
    else app.stop();
  }
});

/** Whether Enter generates rather than begins a line, as it does on the keyboard of a touch screen. */
function isSent({ target, shiftKey, isComposing }) {
  return target === prompt && !shiftKey && !isComposing && !matchMedia("(pointer: coarse)").matches;
}

element("stop").addEventListener("click", () => {
  app.stop();
  prompt.focus();
});
element("again").addEventListener("click", app.again);
element("copy").addEventListener("click", app.copy);
element("save").addEventListener("click", app.saveText);
element("download").addEventListener("click", app.download);
element("delete").addEventListener("click", app.remove);
element("new").addEventListener("click", () => {
  app.choose(null);
  prompt.focus();
});
element("open").addEventListener("click", () => element("file").click());
element("file").addEventListener("change", ({ target }) => {
  if (target.files.length) app.openFiles([...target.files]);
  target.value = "";
});
element("show-tree").addEventListener("click", ({ currentTarget }) => {
  const isOpen = document.body.classList.toggle("tree-open");
  currentTarget.setAttribute("aria-expanded", isOpen);
  if (isOpen) element("new").focus();
});
app.narrow.addEventListener("change", app.showTree);

addEventListener("dragover", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  element("drop").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) element("drop").hidden = true;
});
addEventListener("drop", (event) => {
  element("drop").hidden = true;
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  const isFolder = [...event.dataTransfer.items].some((item) => item.webkitGetAsEntry?.()?.isDirectory);
  app.openFiles([...event.dataTransfer.files], isFolder);
});

for (const id of ["colours", "mono"]) {
  element(id).addEventListener("change", ({ target }) => {
    store(`lmlong.${id}`, JSON.stringify(target.checked));
    app.showLook();
  });
}

// The server's condition

Object.assign(page, {
  askForKey,
  pause,
  back() {
    tellBack(app.isBusy());
    if (!app.isBusy()) app.begin().catch(app.tell);
  },
});

async function look() {
  if (document.visibilityState === "visible" && !(await isThere())) await whenBack();
  setTimeout(look, 1000 * LOOK);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && !app.isBusy()) app.load().then(app.show, app.tell);
});

app.setDraft(read(app.DRAFT) ?? "");
app.show();
app.begin().catch(app.tell);
setTimeout(look, 1000 * LOOK);
prompt.focus();
