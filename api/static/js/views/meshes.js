/** Meshes: every mesh that was tried, what is known of it, and why it lost. */

import { element } from "shardplan/dom.js";
import { bytes, percent, seconds } from "shardplan/format.js";
import { table } from "shardplan/table.js";

export const meshes = { name: "meshes", title: "Meshes", draw };

function draw(view, { formLink }) {
  const rows = view.meshes ?? [];
  const best = view.solver?.fastest_s ?? view.time?.step_s ?? null;
  const columns = [
    { title: "Mesh", value: (row) => row.mesh },
    {
      title: "Outcome",
      value: (row) => row.outcome,
      text: (outcome) => element("span", { class: outcome === "chosen" ? "badge good" : "badge" }, outcome),
    },
    { title: "Step", value: (row) => row.step_s, text: seconds, number: true },
    { title: "At least", value: (row) => row.at_least_s, text: seconds, number: true },
    {
      title: "Over the fastest",
      value: (row) => (best && row.step_s != null ? row.step_s / best - 1 : null),
      text: percent,
      number: true,
    },
  ];
  if (rows.some((row) => row.peak_bytes != null))
    columns.push({ title: "Peak", value: (row) => row.peak_bytes, text: bytes, number: true });
  columns.push({
    title: "Why",
    value: (row) => row.why,
    text: (why) => element("span", { class: "why" }, why || "\u2013"),
  });
  if (formLink) {
    const link = (mesh) =>
      element(
        "a",
        { class: "button quiet no-print", href: formLink({ mesh }), "aria-label": `Plan on it: ${mesh}` },
        "Plan on it",
      );
    columns.push({ title: "Plan", value: (row) => row.mesh, text: link, extra: true });
  }
  return table({
    title: "Meshes that were tried",
    columns,
    rows,
    empty: "One mesh was given, so no others were tried.",
    limit: 200,
  });
}
