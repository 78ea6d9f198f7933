/** Texts that this browser stores for the page. A report that is opened from a file may have no storage. */

/** Returns the text that is stored under a key; null: there is none. */
export function storedText(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** Stores a text under a key; without storage, it is forgotten when the page is closed. */
export function storeText(key, text) {
  try {
    localStorage.setItem(key, text);
  } catch {
    return;
  }
}
