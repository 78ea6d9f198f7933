/** Communication of a step: totals by axis, and every kind of collective. */

import { stackedBar } from "shardplan/bars.js";
import { axisRoles, axisVariable } from "shardplan/colours.js";
import { card, emptyText } from "shardplan/dom.js";
import { bytes, percent, seconds, whole } from "shardplan/format.js";
import { table } from "shardplan/table.js";

export const communication = { name: "communication", title: "Communication", draw };

function draw(view) {
  const rows = view.collectives ?? [];
  if (!rows.length) return emptyText("A step of this plan communicates nothing, or the plan has no estimate.");
  const totals = totalsByAxis(rows);
  const all = totals.reduce((sum, total) => sum + total.seconds, 0);
  const roles = axisRoles(view);
  const parts = totals.map((total) => ({
    name: total.axis,
    amount: total.seconds,
    variable: axisVariable(roles.get(total.axis)),
  }));
  return [
    card("Seconds by axis", stackedBar({ label: "Communication by axis", parts, whole: all, format: seconds })),
    table({
      title: "Totals by axis",
      columns: [
        { title: "Axis", value: (row) => row.axis },
        { title: "Collectives", value: (row) => row.count, text: whole, number: true },
        { title: "Bytes sent", value: (row) => row.bytes, text: bytes, number: true },
        { title: "Seconds", value: (row) => row.seconds, text: seconds, number: true },
        { title: "Share", value: (row) => (all ? row.seconds / all : null), text: percent, number: true },
      ],
      rows: totals,
    }),
    table({
      title: "Collectives of a step",
      columns: [
        { title: "Collective", value: (row) => row.kind },
        { title: "Axis", value: (row) => row.axis },
        { title: "Phase", value: (row) => row.phase },
        { title: "Count", value: (row) => row.count, text: whole, number: true },
        { title: "Bytes of one", value: (row) => row.bytes, text: bytes, number: true },
        { title: "Seconds of all", value: (row) => row.time_s, text: seconds, number: true },
      ],
      rows,
    }),
  ];
}

function totalsByAxis(rows) {
  const totals = new Map();
  for (const row of rows) {
    const total = totals.get(row.axis) ?? { axis: row.axis, count: 0, bytes: 0, seconds: 0 };
    total.count += row.count;
    total.bytes += row.count * row.bytes;
    total.seconds += row.time_s;
    totals.set(row.axis, total);
  }
  return [...totals.values()].sort((one, other) => other.seconds - one.seconds);
}
