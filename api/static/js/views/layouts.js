/** Layouts: the module tree with the placement of each parameter on each axis, and the layouts at boundaries. */

import { axisRoles, axisVariable, css } from "shardplan/colours.js";
import { element, emptyText, hiddenText } from "shardplan/dom.js";
import { bytes, placements } from "shardplan/format.js";
import { copyButton, csv, scrollRegion, table, tableFrame } from "shardplan/table.js";
import { filtered, flattened, moduleTree } from "shardplan/views/module_tree.js";

export const layouts = { name: "layouts", title: "Layouts", draw };

const OPENED_ROWS = 60;

function draw(view, context) {
  return [parameterTree(view, context), boundaryTable(view)];
}

function parameterTree(view, { formLink }) {
  const parameters = view.parameters ?? [];
  if (!parameters.length) return emptyText("This plan names no parameters.");
  const tree = moduleTree(parameters);
  const closed = new Set(
    parameters.length > OPENED_ROWS
      ? flattened(tree, () => true)
          .filter(({ level }) => level > 1)
          .map(({ node }) => node.path)
      : [],
  );
  const body = element("tbody");
  const found = element("p", { class: "quiet", role: "status" });
  const search = element("input", { type: "search", autocomplete: "off", spellcheck: "false", on: { input: fill } });

  function fill() {
    const wanted = search.value.trim().toLowerCase();
    const kept = wanted ? filtered(tree, (parameter) => parameter.name.toLowerCase().includes(wanted)) : tree;
    const open = (node) => wanted !== "" || !closed.has(node.path);
    const rows = kept ? flattened(kept, open) : [];
    body.replaceChildren(...rows.map(({ node, level }) => treeRow(node, level, open(node))));
    const matches = rows.filter(({ node }) => node.parameter).length;
    found.textContent = wanted ? `${matches} of ${parameters.length} parameters match.` : "";
  }

  function toggle(node) {
    if (!closed.delete(node.path)) closed.add(node.path);
    fill();
    [...body.querySelectorAll("button.fold")].find((button) => button.dataset.path === node.path)?.focus();
  }

  function treeRow(node, level, open) {
    const folds = node.children.length > 0;
    const fold = folds
      ? element(
          "button",
          {
            type: "button",
            class: "fold",
            "data-path": node.path,
            "aria-expanded": String(open),
            on: { click: () => toggle(node) },
          },
          node.name,
        )
      : element("span", { class: "leaf" }, node.name);
    const alike =
      node.count > 1 && node.name.includes("*") ? element("span", { class: "quiet" }, ` (x${node.count})`) : null;
    const name = element("th", { scope: "row", title: node.path, style: { "--level": level } }, fold, alike);
    return element("tr", { class: node.parameter ? null : "module" }, name, cells(node, view, formLink));
  }

  fill();
  const columns = parameterColumns();
  const heading = [
    element("h3", {}, "Parameters"),
    element("label", { class: "search no-print" }, "Search by name ", search),
    copyButton("Parameters", () => csv(columns, parameters)),
  ];
  const grid = element("table", { class: "tree", "aria-label": "Parameters" }, treeHead(view, formLink), body);
  return tableFrame(heading, found, scrollRegion("Parameters", grid));
}

function treeHead(view, formLink) {
  const titles = [
    "Module or parameter",
    ...(view.layout_axes ?? []).map((axis) => `${axis}: stored, computed`),
    "Gradient",
    "Shape",
    "Bytes per device",
  ];
  return element(
    "thead",
    {},
    element(
      "tr",
      {},
      titles.map((title, index) =>
        element("th", { scope: "col", class: index === titles.length - 1 ? "number" : null }, title),
      ),
      formLink ? element("th", { scope: "col", class: "no-print" }, hiddenText("Pin")) : null,
    ),
  );
}

function cells(node, view, formLink) {
  const { parameter } = node;
  const axes = view.layout_axes ?? [];
  const size = element("td", { class: "number", "data-value": node.bytes }, bytes(node.bytes));
  if (!parameter)
    return [
      axes.map(() => element("td")),
      element("td"),
      element("td"),
      size,
      formLink ? element("td", { class: "no-print" }) : null,
    ];
  const roles = axisRoles(view);
  const placed = axes.map((axis, index) =>
    element(
      "td",
      {},
      chip(parameter.stored?.[index], roles.get(axis), "stored"),
      chip(parameter.computed?.[index], roles.get(axis), "computed"),
    ),
  );
  const shape = parameter.shape ? parameter.shape.join(" x ") : "\u2013";
  const pins = axes.map((axis, index) => `${parameter.name}=${parameter.stored?.[index] ?? "R"}@${axis}`);
  const pin = formLink
    ? element(
        "td",
        { class: "no-print" },
        element(
          "a",
          { class: "button quiet", href: formLink({ pins }), "aria-label": `Pin ${parameter.name} and plan again` },
          "Pin",
        ),
      )
    : null;
  return [
    placed,
    element("td", {}, placements(parameter.gradient)),
    element("td", { class: "shape" }, shape),
    size,
    pin,
  ];
}

/** Returns a placement on an axis: filled with the axis' colour where it shards, an outline where it replicates. */
export function chip(placement, role, meaning) {
  const shards = placement != null && placement !== "R";
  return element(
    "span",
    { class: shards ? "chip shards" : "chip", style: { "--axis": css(axisVariable(role)) } },
    hiddenText(`${meaning} `),
    placement ?? "\u2013",
  );
}

function parameterColumns() {
  return [
    { title: "Parameter", value: (row) => row.name },
    { title: "Count", value: (row) => row.count },
    { title: "Shape", value: (row) => row.shape },
    { title: "Stored", value: (row) => row.stored },
    { title: "Computed", value: (row) => row.computed },
    { title: "Gradient", value: (row) => row.gradient },
    { title: "Bytes", value: (row) => row.bytes },
  ];
}

function boundaryTable(view) {
  const columns = [
    { title: "Module", value: (row) => row.module },
    { title: "Tensor", value: (row) => row.tensor },
    { title: "From", value: (row) => row.from, text: placements },
    { title: "To", value: (row) => row.to, text: placements },
  ];
  const title = view.layout_axes?.length
    ? `Layouts at boundaries of modules, by ${view.layout_axes.join(", ")}`
    : "Layouts at boundaries of modules";
  return table({ title, columns, rows: view.boundaries ?? [], empty: "No tensor changes its layout at a boundary." });
}
