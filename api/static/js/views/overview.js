/** Overview of a plan: what to know first, the mesh, memory and time as bars, and the baselines. */

import { stackedBar } from "shardplan/bars.js";
import { timeVariable } from "shardplan/colours.js";
import { card, details, element, emptyText } from "shardplan/dom.js";
import { anyText, bytes, percent, seconds } from "shardplan/format.js";
import { table } from "shardplan/table.js";
import { baselinePlot } from "shardplan/views/baselines.js";
import { memoryBar } from "shardplan/views/memory.js";
import { meshDrawing } from "shardplan/views/mesh_drawing.js";
import { pipelineCard } from "shardplan/views/pipeline.js";

export const overview = { name: "overview", title: "Overview", draw };

function draw(view) {
  return [
    remarks("Warnings", view.warnings, "warning"),
    remarks("Assumed", view.assumed, "assumed"),
    element(
      "div",
      { class: "cards" },
      stack(card("Mesh", meshDrawing(view)), card("Compared with fixed strategies", baselinePlot(view))),
      stack(
        card("Memory at the peak of a device", memoryBar(view.memory)),
        card("Time of a step", timeBars(view.time)),
      ),
    ),
    pipelineCard(view),
    card("How the plan was found", search(view)),
    remarks("Notes", view.notes, "note"),
  ].filter(Boolean);
}

function stack(...cards) {
  return element("div", { class: "stack" }, cards);
}

function remarks(title, texts, kind) {
  if (!texts?.length) return null;
  return element(
    "section",
    { class: `remarks ${kind}` },
    element("h3", {}, title),
    element(
      "ul",
      {},
      texts.map((text) => element("li", {}, text)),
    ),
  );
}

/** Returns the bars of a step's parts and of its phases. */
export function timeBars(time) {
  if (!time) return emptyText("This plan has no estimate of time.");
  const bar = (label, parts) =>
    stackedBar({
      label,
      whole: time.step_s,
      format: seconds,
      parts: parts.map((part) => ({ ...part, amount: part.seconds, variable: timeVariable(part.name) })),
    });
  const columns = [
    { title: "Bar", value: (row) => row.bar },
    { title: "Part", value: (row) => row.name },
    { title: "Seconds", value: (row) => row.seconds, text: seconds, number: true },
    {
      title: "Share of the step",
      value: (row) => (time.step_s ? row.seconds / time.step_s : null),
      text: percent,
      number: true,
    },
    { title: "Note", value: (row) => row.note ?? "" },
  ];
  const rows = [
    ...(time.parts ?? []).map((part) => ({ bar: "parts", ...part })),
    ...(time.phases ?? []).map((part) => ({ bar: "phases", ...part })),
  ];
  const overlap = `Communication takes ${seconds(time.communication_s)}, of which ${seconds(time.overlapped_s)} is overlapped with compute.`;
  return [
    bar("Parts of a step", time.parts ?? []),
    time.phases?.length ? bar("Phases of a step", time.phases) : null,
    element("p", { class: "quiet" }, overlap),
    details("Table", table({ title: "Time of a step", columns, rows })),
  ];
}

function search(view) {
  const { solver, techniques, timings } = view;
  const facts = [
    ["Micro-batches", anyText(view.micro_batches)],
    ["Activation checkpointing", anyText(view.checkpointing)],
    ["Memory cap", bytes(view.cap_bytes)],
  ];
  if (solver)
    facts.push(
      ["Status", anyText(solver.status)],
      ["Lower bound", seconds(solver.bound_s)],
      ["Gap", percent(solver.gap)],
    );
  if (solver?.fastest_s != null)
    facts.push(["Fastest plan found", `${seconds(solver.fastest_s)} on ${solver.fastest_mesh ?? "the same mesh"}`]);
  for (const technique of techniques ?? []) {
    facts.push([
      technique.name,
      technique.saves_s == null ? "used" : `used, saves ${seconds(technique.saves_s)} a step`,
    ]);
  }
  const columns = [
    { title: "Work", value: (row) => row[0] },
    { title: "Seconds", value: (row) => row[1], text: seconds, number: true },
  ];
  const work = Object.entries(timings ?? {}).map(([name, time]) => [
    name.replace(/_s$/, "").replaceAll("_", " "),
    time,
  ]);
  return [
    element(
      "dl",
      { class: "facts" },
      facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
    ),
    work.length ? details("Time of planning", table({ title: "Time of planning", columns, rows: work })) : null,
  ];
}
