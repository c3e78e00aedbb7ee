// The status line, and the dialogs for the API key and for confirmation.

import { element } from "./dom.js";

const AWAY = "The server does not respond. The page reconnects by itself; nothing is lost.";

let toldBefore = ""; // the status before the server was away

/** Show a message in the status line, which screen readers announce. */
export function say(text, isError = false) {
  const status = element("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

/** Wait for the next attempt to reach the server, with a countdown, or until the user asks for it. */
export function pause(seconds) {
  if (element("status").textContent !== AWAY) toldBefore = element("status").textContent;
  say(AWAY, true);
  const [countdown, now] = [element("countdown"), element("now")];
  const end = performance.now() + 1000 * seconds;
  return new Promise((resolve) => {
    const tick = () => {
      const left = Math.ceil((end - performance.now()) / 1000);
      countdown.textContent = left > 0 ? `Next try in ${left} s.` : "";
      if (left <= 0) finish();
    };
    const timer = setInterval(tick, 200);
    const finish = () => {
      clearInterval(timer);
      countdown.textContent = "";
      now.hidden = true;
      removeEventListener("online", finish);
      now.onclick = null;
      resolve();
    };
    now.hidden = false;
    now.onclick = finish;
    addEventListener("online", finish);
    tick();
  });
}

/** Report that the server is back, or show the earlier message if nothing waited for it. */
export function tellBack(isAwaited) {
  if (element("status").textContent === AWAY) say((!isAwaited && toldBefore) || "The server is back.");
}

/** Ask for the server's API key until one is entered. */
export function askForKey(isWrong) {
  const [dialog, field] = [element("key-dialog"), element("key")];
  const kept = "It is stored in this tab until you close it.";
  element("key-why").textContent = isWrong ? `The server rejected that key. ${kept}` : kept;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.oncancel = (event) => event.preventDefault(); // nothing works without
    dialog.onclose = () => dialog.isConnected && !field.value && dialog.showModal();
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) return;
      dialog.onclose = null;
      dialog.close();
      field.value = "";
      resolve(key);
    };
  });
}

export function isSure(question) {
  const dialog = element("sure");
  element("sure-what").textContent = question;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(false);
    element("sure-no").onclick = () => dialog.close();
    element("sure-yes").onclick = () => {
      resolve(true);
      dialog.close();
    };
  });
}
