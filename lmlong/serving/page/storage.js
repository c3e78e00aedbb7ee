// What the browser keeps for this page, as JSON: in all tabs, or in "sessionStorage" for this tab alone. A browser may
// refuse to keep anything.

export function read(key, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(key));
  } catch {
    return null;
  }
}

/** Keep a JSON text, or nothing where it is null; return whether that worked. */
export function store(key, data, storage = "localStorage") {
  try {
    if (data === null) window[storage].removeItem(key);
    else window[storage].setItem(key, data);
    return true;
  } catch {
    return false;
  }
}
