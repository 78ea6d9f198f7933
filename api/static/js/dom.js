/** Elements of the page, built without markup in strings: text from a plan can never become markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns a new HTML element.
 * @param {string} tag its name
 * @param {Object} attributes `class`, `href`, ...; `on` maps events to listeners, `style` maps CSS properties to values
 *   `true` sets an attribute without a value; null, undefined and false leave it out
 * @param {...(Node|string|number|null|Array)} children nodes and texts; null is left out
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns a new SVG element; arguments as those of `element`. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, { on = {}, style = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}

/** Returns a `<details>` with a summary, closed unless `open`. */
export function details(summary, ...children) {
  return element("details", {}, element("summary", {}, summary), ...children);
}

/** Returns a card: a section with a heading of the third level. */
export function card(title, ...children) {
  return element("section", { class: "card" }, element("h3", {}, title), ...children);
}

/** Returns a card whose heading is of the second level, for pages without other headings of it. */
export function pageCard(title, ...children) {
  return element("section", { class: "card" }, element("h2", {}, title), ...children);
}

/** Returns the text that stands where a plan has no data to draw. */
export function emptyText(text) {
  return element("p", { class: "empty" }, text);
}

/** Returns text that only screen readers read. */
export function hiddenText(text) {
  return element("span", { class: "visually-hidden" }, text);
}

/** Makes the nodes of a list one tab stop, among which the arrow keys move. */
export function roveFocus(nodes) {
  nodes.forEach((node, index) => {
    node.setAttribute("tabindex", index === 0 ? "0" : "-1");
    node.addEventListener("focus", () => {
      for (const other of nodes) other.setAttribute("tabindex", other === node ? "0" : "-1");
    });
    node.addEventListener("keydown", (event) => {
      const steps = {
        ArrowRight: 1,
        ArrowDown: 1,
        ArrowLeft: -1,
        ArrowUp: -1,
        Home: -index,
        End: nodes.length - 1 - index,
      };
      if (!(event.key in steps)) return;
      event.preventDefault();
      nodes[Math.min(nodes.length - 1, Math.max(0, index + steps[event.key]))].focus();
    });
  });
}

/** Offers `text` to be saved as a file. */
export function saveText(text, fileName, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: fileName }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
