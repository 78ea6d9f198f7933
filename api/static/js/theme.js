/** The theme: light, dark, or that of the system; the choice is kept in this browser. */

import { element } from "shardplan/dom.js";
import { storedText, storeText } from "shardplan/storage.js";

const KEY = "shardplan-theme";
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

/** Name of the document's event after which charts are drawn anew. */
export const REDRAW = "shardplan-redraw";

/** Applies the theme that was chosen before, and tells charts when the system's theme changes. */
export function startTheme() {
  applyTheme(stored());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** Returns the select element of the theme. */
export function themeSelect() {
  const options = Object.entries(THEMES).map(([value, text]) =>
    element("option", { value, selected: value === stored() }, text),
  );
  const choose = (event) => {
    storeText(KEY, event.target.value);
    applyTheme(event.target.value);
  };
  return element(
    "label",
    { class: "theme" },
    element("span", {}, "Theme"),
    element("select", { on: { change: choose } }, options),
  );
}

/** Shows a theme, without storing it. */
export function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  redraw();
}

/** Returns the theme that was chosen: auto, light or dark. */
export function stored() {
  const theme = storedText(KEY);
  return theme in THEMES ? theme : "auto";
}

function redraw() {
  document.dispatchEvent(new Event(REDRAW));
}
