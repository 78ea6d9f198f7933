/** The mesh as squares: one per device, grouped by node, with a track per axis that marks the device's coordinate. */

import { axisVariable, css } from "shardplan/colours.js";
import { details, element, emptyText, roveFocus } from "shardplan/dom.js";
import { whole } from "shardplan/format.js";
import { table } from "shardplan/table.js";

const NODES_DRAWN = 4;
const DEVICES_DRAWN = 32;
const ROWS_LISTED = 1024;

/** Returns the drawing of a plan's mesh with the axes' meanings. */
export function meshDrawing(view) {
  const axes = view.axes ?? [];
  if (!axes.length) return emptyText("This plan names no mesh.");
  const total = axes.reduce((product, axis) => product * axis.size, 1);
  const perNode = view.cluster?.devices_per_node ?? total;
  const nodes = Math.max(1, Math.ceil(total / perNode));
  const told = element("p", { class: "quiet", role: "status" }, "Hover over or focus a device to read its rank.");
  const squares = [];
  const boxes = Array.from({ length: Math.min(nodes, NODES_DRAWN) }, (_, node) => {
    const first = node * perNode;
    const drawn = Math.min(perNode, total - first, DEVICES_DRAWN);
    const own = Array.from({ length: drawn }, (_, device) =>
      square(first + device, axes, told, `node ${node}, device ${device}`),
    );
    squares.push(...own);
    const more = Math.min(perNode, total - first) - drawn;
    return element(
      "div",
      { class: "node" },
      element("span", { class: "quiet" }, `Node ${node}`),
      element("div", { class: "devices" }, own),
      more > 0 ? element("span", { class: "quiet" }, `and ${more} more devices`) : null,
    );
  });
  roveFocus(squares);
  const folded =
    nodes > NODES_DRAWN
      ? element("p", { class: "quiet" }, `and ${whole(nodes - NODES_DRAWN)} more nodes, laid out alike`)
      : null;
  return [
    element("div", { class: "mesh", role: "group", "aria-label": "Devices of the mesh" }, boxes),
    folded,
    told,
    axisList(axes),
    details("Table", rankTable(axes, total, perNode)),
  ];
}

function square(rank, axes, told, place) {
  const at = coordinates(rank, axes);
  const text = `Rank ${rank}: ${place}; ${axes.map((axis, index) => `${axis.name} ${at[index]} of ${axis.size}`).join(", ")}`;
  const tell = () => {
    told.textContent = text;
  };
  const track = (axis, index) =>
    element(
      "i",
      {},
      element("i", {
        style: {
          left: `${(100 * at[index]) / axis.size}%`,
          width: `${100 / axis.size}%`,
          background: css(axisVariable(axis.role)),
        },
      }),
    );
  return element(
    "span",
    { class: "device", role: "img", "aria-label": text, on: { mouseenter: tell, focus: tell } },
    element("b", {}, rank),
    axes.map(track),
  );
}

function axisList(axes) {
  const entry = (axis) =>
    element(
      "li",
      {},
      element("span", { class: "mark", style: { background: css(axisVariable(axis.role)) } }),
      element("b", {}, `${axis.name}=${axis.size}`),
      element("span", {}, axis.does),
    );
  return element("ul", { class: "legend stacked-legend" }, axes.map(entry));
}

function rankTable(axes, total, perNode) {
  const columns = [
    { title: "Rank", value: (row) => row.rank, number: true },
    { title: "Node", value: (row) => Math.floor(row.rank / perNode), number: true },
    { title: "Device", value: (row) => row.rank % perNode, number: true },
    ...axes.map((axis, index) => ({ title: axis.name, value: (row) => row.at[index], number: true })),
  ];
  const listed = Math.min(total, ROWS_LISTED);
  const rows = Array.from({ length: listed }, (_, rank) => ({ rank, at: coordinates(rank, axes) }));
  const title = listed < total ? `The first ${whole(listed)} of ${whole(total)} ranks` : "Ranks";
  return table({ title, columns, rows, limit: 32 });
}

/** Returns the coordinates of a rank: row-major, the first axis outermost. */
function coordinates(rank, axes) {
  const at = [];
  for (const axis of [...axes].reverse()) {
    at.unshift(rank % axis.size);
    rank = Math.floor(rank / axis.size);
  }
  return at;
}
