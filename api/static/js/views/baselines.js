/** The plan among fixed strategies, as dots on one scale of step time. */

import { details, element, emptyText, hiddenText } from "shardplan/dom.js";
import { bytes, seconds, whole } from "shardplan/format.js";
import { table } from "shardplan/table.js";

/** Returns the dot plot of a plan and its baselines, with their table. */
export function baselinePlot(view) {
  const baselines = view.baselines ?? [];
  if (!baselines.length) return emptyText("No fixed strategy was priced.");
  const own = { title: "this plan", mesh: "", step_s: view.time?.step_s ?? null, verdict: "", own: true };
  const rows = [own, ...baselines];
  const most = Math.max(...rows.map((row) => row.step_s ?? 0)) * 1.05 || 1;
  const columns = [
    { title: "Strategy", value: (row) => row.title },
    { title: "Mesh", value: (row) => row.mesh },
    { title: "Step", value: (row) => row.step_s, text: seconds, number: true },
    { title: "Peak", value: (row) => row.peak_bytes, text: bytes, number: true },
    { title: "Micro-batches", value: (row) => row.micro_batches, text: whole, number: true },
    { title: "Checkpointing", value: (row) => row.checkpointing },
    { title: "Verdict", value: (row) => row.verdict },
  ];
  return [
    element(
      "ul",
      { class: "dots" },
      rows.map((row) => dotRow(row, most)),
    ),
    element("p", { class: "scale quiet" }, element("span", {}, "0 s"), element("span", {}, seconds(most))),
    details("Table", table({ title: "Fixed strategies", columns, rows: baselines })),
  ];
}

function dotRow(row, most) {
  const share = row.step_s == null ? null : (100 * row.step_s) / most;
  const dot = share == null ? null : element("span", { class: "dot", style: { left: `${share}%` } });
  const text = row.step_s == null ? row.verdict || "no time known" : seconds(row.step_s);
  return element(
    "li",
    { class: row.own ? "own" : null, title: row.verdict || null },
    element("span", {}, row.title, row.mesh ? element("small", {}, ` ${row.mesh}`) : null, hiddenText(": ")),
    element("span", { class: "dot-track", "aria-hidden": "true" }, dot),
    element("b", {}, text),
  );
}
