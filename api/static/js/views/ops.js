/** Ops: the graph of one section of the model, with its redistributions and what they take. */

import { card, element, emptyText } from "shardplan/dom.js";
import { flops, placements, seconds, whole } from "shardplan/format.js";
import { table } from "shardplan/table.js";
import { opGraph } from "shardplan/views/op_graph.js";

export const ops = { name: "ops", title: "Ops", keys: ["section"], draw };

const MOST_DRAWN = 250;

function draw(view, { state }) {
  const sections = view.sections ?? [];
  if (!sections.length || !view.ops?.length) return emptyText("This plan has no ops.");
  const chosen = chosenSection(view, state.get("section"));
  const rows = view.ops.map((op, index) => ({ ...op, index })).filter((op) => op.section === chosen);
  const redistributions = (view.redistributions ?? []).filter((item) => item.section === chosen);
  return [
    sectionSelect(view, chosen, state),
    card(
      "Graph",
      rows.length > MOST_DRAWN
        ? emptyText(`This section has ${rows.length} ops, too many to draw; the tables list them.`)
        : opGraph(rows, redistributions),
    ),
    redistributionTable(redistributions, view.ops),
    opTable(rows),
  ];
}

/** Returns the section that the state names, or the one whose ops take longest. */
function chosenSection(view, wanted) {
  if (wanted != null && view.sections[Number(wanted)]) return Number(wanted);
  const times = view.sections.map(() => 0);
  for (const op of view.ops) times[op.section] += (op.forward_s ?? 0) + (op.backward_s ?? 0);
  return times.indexOf(times.reduce((most, time) => Math.max(most, time), 0));
}

function sectionSelect(view, chosen, state) {
  const name = (section) =>
    section.calls > 1 ? `${section.module} (x${section.calls})` : section.module || "the model itself";
  const options = view.sections.map((section, index) =>
    element("option", { value: index, selected: index === chosen }, `${index + 1}. ${name(section)}`),
  );
  const choose = (event) => state.go({ section: event.target.value });
  return element(
    "p",
    {},
    element(
      "label",
      { class: "inline" },
      "Section of the model ",
      element("select", { on: { change: choose } }, options),
    ),
  );
}

function opTable(rows) {
  const columns = [
    { title: "Op", value: (row) => row.op },
    { title: "Module", value: (row) => row.module },
    { title: "Calls", value: (row) => row.calls, text: whole, number: true },
    { title: "Work of a call, all devices", value: (row) => row.flops, text: (value) => flops(value), number: true },
    { title: "Forward", value: (row) => row.forward_s, text: seconds, number: true },
    { title: "Backward", value: (row) => row.backward_s, text: seconds, number: true },
  ];
  return table({ title: "Ops, seconds of all calls in a step", columns, rows });
}

function redistributionTable(rows, allOps) {
  const op = (index) => (index == null ? "input of the section" : `${allOps[index].op} of ${allOps[index].module}`);
  const columns = [
    { title: "Tensor", value: (row) => row.tensor },
    { title: "Producer", value: (row) => op(row.producer) },
    { title: "Consumer", value: (row) => op(row.consumer) },
    { title: "From", value: (row) => row.from, text: placements },
    { title: "To", value: (row) => row.to, text: placements },
    { title: "Seconds", value: (row) => row.seconds, text: seconds, number: true },
  ];
  return table({
    title: "Redistributions, seconds of all calls in a step",
    columns,
    rows,
    empty: "No tensor is redistributed in this section.",
  });
}
