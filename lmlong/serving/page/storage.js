// What the browser stores for this page, as JSON: for all tabs, or in "sessionStorage" for this tab only. A browser may
// refuse to store anything.

export function read(key, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(key));
  } catch {
    return null;
  }
}

/** Store a JSON text, or remove it if null; return whether that worked. */
export function store(key, data, storage = "localStorage") {
  try {
    if (data === null) window[storage].removeItem(key);
    else window[storage].setItem(key, data);
    return true;
  } catch {
    return false;
  }
}
