/** Stacked bars and legends, drawn with boxes: they print, scale and are read without a script. */

import { css } from "shardplan/colours.js";
import { element } from "shardplan/dom.js";

/**
 * Returns a stacked bar with a legend that names every part and its amount.
 * @param {Object} bar
 * @param {string} bar.label what the bar shows
 * @param {Array<{name: string, amount: number, note?: string, variable: string}>} bar.parts
 * @param {number} bar.whole amount of the bar's full width
 * @param {function(number): string} bar.format
 * @param {Array<{name: string, amount: number, dashed: boolean}>} [bar.marks] lines across the bar
 */
export function stackedBar({ label, parts, whole, format, marks = [] }) {
  const shown = parts.filter((part) => part.amount > 0);
  const share = (amount) => `${Math.min(100, (100 * amount) / (whole || 1))}%`;
  const segment = (part) =>
    element("span", {
      title: `${part.name}: ${format(part.amount)}`,
      style: { width: share(part.amount), background: css(part.variable) },
    });
  const line = (mark) =>
    element("span", {
      class: lineClass("mark-line", mark),
      title: `${mark.name}: ${format(mark.amount)}`,
      style: { left: `min(${share(mark.amount)}, 100% - 2px)` },
    });
  const text = [...shown, ...marks].map((part) => `${part.name} ${format(part.amount)}`).join(", ");
  return element(
    "figure",
    { class: "stacked" },
    element(
      "div",
      { class: "bar", role: "img", "aria-label": `${label}: ${text}` },
      shown.map(segment),
      marks.map(line),
    ),
    legend(
      parts.map((part) => ({ ...part, text: format(part.amount) })),
      marks.map((mark) => ({ ...mark, text: format(mark.amount) })),
    ),
  );
}

/**
 * Returns a legend.
 * @param {Array<{name: string, variable: string, text?: string, note?: string}>} items
 * @param {Array<{name: string, text?: string, dashed: boolean}>} [lines] items that a line marks
 */
export function legend(items, lines = []) {
  const entry = (item, mark) =>
    element(
      "li",
      { title: item.note || null },
      mark,
      element("span", {}, item.name),
      item.text ? element("b", {}, item.text) : null,
    );
  return element(
    "ul",
    { class: "legend" },
    items.map((item) => entry(item, element("span", { class: "mark", style: { background: css(item.variable) } }))),
    lines.map((item) => entry(item, element("span", { class: lineClass("mark line", item) }))),
  );
}

function lineClass(base, { dashed }) {
  return dashed ? `${base} dashed` : base;
}
