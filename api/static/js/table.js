/** Tables: sortable, copied as CSV, scrolled inside a region of their own. */

import { element, emptyText, saveText } from "shardplan/dom.js";

/**
 * Returns a table with its title and a "Copy CSV" button, or a text where it has no rows.
 * @param {Object} table
 * @param {string} table.title
 * @param {number} [table.level] level of the title as a heading
 * @param {Array<Object>} table.columns `title`; `value`, the raw value of a row; `text`, the raw value as text or a node
 *   (default: as it is); `number`, whether values are numbers; `extra`, whether CSV leaves the column out
 * @param {Array} table.rows
 * @param {string} [table.empty] the text where there are no rows
 * @param {number} [table.limit] rows shown before "Show all" is pressed
 * @param {boolean} [table.sortable]
 */
export function table({ title, level = 3, columns, rows, empty = "None.", limit = 100, sortable = rows.length > 1 }) {
  const heading = element(`h${level}`, {}, title);
  if (!rows.length) return element("div", { class: "table" }, heading, emptyText(empty));
  let [sortedBy, ascending, shown] = [null, true, limit];
  const head = element("tr");
  const body = element("tbody");
  const more = element("button", {
    type: "button",
    class: "quiet",
    on: {
      click: () => {
        shown = rows.length;
        draw();
      },
    },
  });

  function draw() {
    const sorted = sortedBy
      ? [...rows].sort((one, other) => compared(sortedBy.value(one), sortedBy.value(other), ascending))
      : rows;
    head.replaceChildren(...columns.map((column) => headCell(column)));
    body.replaceChildren(
      ...sorted.slice(0, shown).map((row) =>
        element(
          "tr",
          {},
          columns.map((column, index) => cell(column, row, index)),
        ),
      ),
    );
    more.hidden = shown >= rows.length;
    more.textContent = `Show all ${rows.length.toLocaleString("en-US")} rows`;
  }

  function headCell(column) {
    const look = { scope: "col", class: column.number ? "number" : null };
    if (!sortable || column.extra) return element("th", look, column.title);
    const order = column === sortedBy ? (ascending ? "ascending" : "descending") : "none";
    const sort = () => {
      [sortedBy, ascending] = [column, column === sortedBy ? !ascending : true];
      draw();
      head.children[columns.indexOf(column)].querySelector("button").focus();
    };
    return element(
      "th",
      { ...look, "aria-sort": order },
      element("button", { type: "button", on: { click: sort } }, column.title),
    );
  }

  draw();
  const copy = copyButton(title, () => csv(columns, rows));
  const grid = element("table", { "aria-label": title }, element("thead", {}, head), body);
  return tableFrame([heading, copy], scrollRegion(title, grid), more);
}

/** Returns what surrounds a table: a line with its heading and controls, then the table and what belongs to it. */
export function tableFrame(heading, ...parts) {
  return element("div", { class: "table" }, element("div", { class: "table-head" }, heading), ...parts);
}

/** Returns a focusable region in which something wide scrolls. */
export function scrollRegion(label, ...children) {
  return element("div", { class: "scroll", role: "group", "aria-label": label, tabindex: "0" }, ...children);
}

/** Returns a button that copies `text()` to the clipboard, or saves it where there is no clipboard. */
export function copyButton(title, text) {
  const state = element("span", { role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      state.textContent = "Copied";
    } catch {
      saveText(text(), `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.csv`, "text/csv");
      state.textContent = "Saved";
    }
    setTimeout(() => (state.textContent = ""), 2000);
  };
  const name = `Copy CSV of ${title}`;
  return element(
    "span",
    { class: "copy no-print" },
    state,
    element("button", { type: "button", class: "quiet", "aria-label": name, on: { click: copy } }, "Copy CSV"),
  );
}

/** Returns rows as CSV (RFC 4180); texts that a spreadsheet would run as a formula are quoted with an apostrophe. */
export function csv(columns, rows) {
  const kept = columns.filter((column) => !column.extra);
  const lines = [kept.map((column) => column.title), ...rows.map((row) => kept.map((column) => column.value(row)))];
  return lines.map((line) => line.map(csvField).join(",")).join("\r\n");
}

function csvField(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(value);
  const text = Array.isArray(value) ? value.join(" ") : String(value);
  return `"${text.replace(/^(?=[=+\-@\t\r])/, "'").replaceAll('"', '""')}"`;
}

function cell(column, row, index) {
  const value = column.value(row);
  const tag = index === 0 && !column.number ? "th" : "td";
  const exact = typeof value === "number" ? value : null;
  const content = column.text ? column.text(value, row) : (value ?? "\u2013");
  return element(
    tag,
    { scope: tag === "th" ? "row" : null, class: column.number ? "number" : null, "data-value": exact },
    content,
  );
}

function compared(one, other, ascending) {
  if (one == null || other == null) return (one == null) - (other == null); // missing values stay last
  const order =
    typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return ascending ? order : -order;
}
