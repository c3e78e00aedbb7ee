// What the page tells and asks: its status, a key, whether somebody is sure.

import { element } from "./dom.js";

const AWAY = "The server does not answer. The page goes on as soon as it does; nothing is lost.";

let toldBefore = ""; // the status before the server was away

/** Tell something in the status line, which readers of the screen hear. */
export function say(text, isError = false) {
  const status = element("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

/** Wait until the next look whether the server is back, as the status tells; or until somebody asks for it. */
export function pause(seconds) {
  if (element("status").textContent !== AWAY) toldBefore = element("status").textContent;
  say(AWAY, true);
  const [countdown, now] = [element("countdown"), element("now")];
  const end = performance.now() + 1000 * seconds;
  return new Promise((resolve) => {
    const tick = () => {
      const left = Math.ceil((end - performance.now()) / 1000);
      countdown.textContent = left > 0 ? `Next look in ${left} s.` : "";
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

/** Tell that the server is back; or what was told before, where nothing waited for it. */
export function tellBack(isAwaited) {
  if (element("status").textContent === AWAY) say((!isAwaited && toldBefore) || "The server is back.");
}

/** Ask for the server's key until there is one. */
export function askForKey(isWrong) {
  const [dialog, field] = [element("key-dialog"), element("key")];
  const kept = "It is kept in this tab alone, until you close it.";
  element("key-why").textContent = isWrong ? `The server did not take that key. ${kept}` : kept;
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
