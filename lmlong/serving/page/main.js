// The page's events.

import * as app from "./app.js";
import { element } from "./dom.js";
import { watchOptions } from "./options.js";

const prompt = element("prompt");

function onClick(id, action) {
  element(id).addEventListener("click", () => Promise.resolve(action()).catch(app.tell));
}

onClick("again", app.again);
onClick("save", app.saveText);
onClick("download", app.saveState);
onClick("delete", app.deleteTurn);
onClick("begin", app.write);
onClick("open", () => element("file").click());
onClick("stop", () => {
  app.stop();
  prompt.focus();
});
onClick("new", () => {
  app.choose(null);
  prompt.focus();
});
onClick("show-tree", () => {
  const isOpen = document.body.classList.toggle("tree-open");
  element("show-tree").setAttribute("aria-expanded", isOpen);
  if (isOpen) element("new").focus();
});
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  app.write();
});
prompt.addEventListener("input", app.showButtons);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey || isSent(event))) {
    event.preventDefault();
    app.write();
  } else if (event.key === "Escape" && !app.card.isOpen) {
    if (document.body.classList.contains("tree-open")) element("show-tree").click();
    else app.stop();
  }
});

/** Whether Enter generates rather than begins a line, as it does on the keyboard of a touch screen. */
function isSent({ target, shiftKey, isComposing }) {
  return target === prompt && !shiftKey && !isComposing && !matchMedia("(pointer: coarse)").matches;
}

element("file").addEventListener("change", ({ target }) => {
  if (target.files.length) app.openFiles([...target.files]);
  target.value = "";
});
addEventListener("dragover", (event) => {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  const isFolder = [...event.dataTransfer.items].some((item) => item.webkitGetAsEntry?.()?.isDirectory);
  app.openFiles([...event.dataTransfer.files], isFolder);
});

matchMedia("(max-width: 760px)").addEventListener("change", app.show);
addEventListener("serverback", () => {
  if (!app.isBusy()) app.begin().catch(app.tell);
});
addEventListener("hashchange", () => app.choose(location.hash.slice(1) || null));
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && !app.isBusy()) app.refresh().catch(app.tell);
});

watchOptions(app.show);
app.begin().catch(app.tell);
prompt.focus();
