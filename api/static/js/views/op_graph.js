/** The layered graph of a section's ops as SVG; edges with a redistribution are marked and priced. */

import dagre from "dagre";
import { element, hiddenText, roveFocus, svg } from "shardplan/dom.js";
import { flops, placements, seconds } from "shardplan/format.js";
import { scrollRegion } from "shardplan/table.js";
import { nameParts } from "shardplan/views/module_tree.js";

const BOX = { width: 168, height: 44 };
const LETTERS = 22;
const MARGIN = 12;

/**
 * Returns the drawing of a section's ops.
 * @param {Array<Object>} ops the section's ops, each with its `index` among all ops
 * @param {Array<Object>} redistributions those of the section
 */
export function opGraph(ops, redistributions) {
  const graph = laidOut(ops, redistributions);
  const { left, top, width, height } = extent(graph);
  const told = element(
    "p",
    { class: "quiet", role: "status" },
    "Hover over or focus an op to read its figures; the arrow keys move between ops.",
  );
  const boxes = ops.map((op) => box(op, graph.node(String(op.index)), told));
  roveFocus(boxes);
  const edges = graph.edges().map((edge) => edgeShape(graph.edge(edge), told));
  const drawing = svg(
    "svg",
    {
      class: "graph",
      width,
      height,
      viewBox: `${left} ${top} ${width} ${height}`,
      role: "group",
      "aria-label": "Graph of ops",
    },
    arrowHeads(),
    edges,
    boxes,
  );
  const key = element(
    "p",
    { class: "quiet" },
    hiddenText("Key: "),
    "A thick edge is a redistribution, with the seconds of all its calls in a step.",
  );
  const region = scrollRegion("Graph of ops", drawing);
  if (ops.length) showFirst(region, graph.node(String(ops[0].index)).x - left);
  return [key, region, told];
}

/** Scrolls a region sideways, once it is on the page, so that what is drawn at `x` is in its middle. */
function showFirst(region, x) {
  const observer = new ResizeObserver(() => {
    if (!region.clientWidth) return;
    region.scrollLeft = x - region.clientWidth / 2;
    observer.disconnect();
  });
  observer.observe(region);
}

function laidOut(ops, redistributions) {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 40 });
  graph.setDefaultEdgeLabel(() => ({}));
  const inSection = new Set(ops.map((op) => op.index));
  for (const op of ops) graph.setNode(String(op.index), { ...BOX });
  const priced = new Set();
  redistributions.forEach((item, number) => {
    if (!inSection.has(item.consumer)) return;
    priced.add(`${item.producer} ${item.consumer}`);
    const from = inSection.has(item.producer) ? String(item.producer) : inputNode(graph, item, number);
    const text = `${placements(item.from)} \u2192 ${placements(item.to)}, ${seconds(item.seconds)}`;
    graph.setEdge(
      from,
      String(item.consumer),
      { item, text, width: text.length * 6.4 + 10, height: 18, labelpos: "c" },
      `redistribution ${number}`,
    );
  });
  for (const op of ops) {
    for (const input of op.inputs ?? []) {
      if (inSection.has(input) && !priced.has(`${input} ${op.index}`))
        graph.setEdge(String(input), String(op.index), {}, "plain");
    }
  }
  dagre.layout(graph);
  return graph;
}

/** Returns the rectangle of all boxes and edges; dagre's own leaves out edges that pass beside the boxes. */
function extent(graph) {
  const points = graph.edges().flatMap((edge) => graph.edge(edge).points);
  for (const { x, y, width, height } of graph.nodes().map((node) => graph.node(node))) {
    points.push({ x: x - width / 2, y: y - height / 2 }, { x: x + width / 2, y: y + height / 2 });
  }
  const [xs, ys] = [points.map(({ x }) => x), points.map(({ y }) => y)];
  const [left, top] = [Math.min(...xs) - MARGIN, Math.min(...ys) - MARGIN];
  return { left, top, width: Math.max(...xs) + MARGIN - left, height: Math.max(...ys) + MARGIN - top };
}

/** Returns the key of a small node that stands for the section's input. */
function inputNode(graph, item, number) {
  const key = `input ${item.tensor ?? number}`;
  graph.setNode(key, { width: 8, height: 8 });
  return key;
}

function box(op, { x, y }, told) {
  const figures = [
    `${op.calls} calls`,
    op.flops ? `${flops(op.flops)} a call` : null,
    `forward ${seconds(op.forward_s)}`,
    op.backward_s ? `backward ${seconds(op.backward_s)}` : null,
  ];
  const text = `${op.op} of ${op.module || "the model"}: ${figures.filter(Boolean).join(", ")}`;
  const tell = () => {
    told.textContent = text;
  };
  const line = (content, top, kind) => svg("text", { x: 0, y: top, class: kind }, content);
  return svg(
    "g",
    {
      class: op.flops ? "op heavy" : "op",
      role: "img",
      "aria-label": text,
      transform: `translate(${x} ${y})`,
      on: { mouseenter: tell, focus: tell },
    },
    svg("rect", { x: -BOX.width / 2, y: -BOX.height / 2, width: BOX.width, height: BOX.height, rx: 6 }),
    line(shortened(op.op), -4, "name"),
    line(shortened(tail(op.module)), 13, "module"),
  );
}

function edgeShape(edge, told) {
  const path = edge.points.map(({ x, y }, index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(" ");
  if (!edge.item) return svg("path", { class: "edge", d: path, "marker-end": "url(#arrow)" });
  const tell = () => {
    told.textContent = `Redistribution of ${edge.item.tensor ?? "a tensor"}: ${edge.text}`;
  };
  return svg(
    "g",
    { class: "redistribution", on: { mouseenter: tell } },
    svg("path", { d: path, "marker-end": "url(#arrow-marked)" }),
    svg("rect", { x: edge.x - edge.width / 2, y: edge.y - 9, width: edge.width, height: 18, rx: 9 }),
    svg("text", { x: edge.x, y: edge.y + 4 }, edge.text),
  );
}

function arrowHeads() {
  const head = (id) =>
    svg(
      "marker",
      {
        id,
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 7,
        markerHeight: 7,
        markerUnits: "userSpaceOnUse",
        orient: "auto",
      },
      svg("path", { d: "M0 0L8 4L0 8z" }),
    );
  return svg("defs", {}, head("arrow"), head("arrow-marked"));
}

function tail(module) {
  return nameParts(module ?? "")
    .slice(-2)
    .join(".");
}

function shortened(text) {
  return text.length > LETTERS ? `\u2026${text.slice(1 - LETTERS)}` : text;
}
