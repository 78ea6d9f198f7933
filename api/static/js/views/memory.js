/** Memory of a device: its peak by role against the capacity, and its course over a step. */

import { stackedBar } from "shardplan/bars.js";
import { axisLook, chart, tooltipContent } from "shardplan/chart.js";
import { memoryVariable } from "shardplan/colours.js";
import { card, details, emptyText } from "shardplan/dom.js";
import { bytes, percent, seconds } from "shardplan/format.js";
import { table } from "shardplan/table.js";

export const memory = { name: "memory", title: "Memory", draw };

function draw({ memory }) {
  if (!memory) return emptyText("This plan has no estimate of memory.");
  const columns = [
    { title: "Role", value: (row) => row.label },
    { title: "Bytes at the peak", value: (row) => row.bytes, text: bytes, number: true },
    {
      title: "Share",
      value: (row) => (memory.peak_bytes ? row.bytes / memory.peak_bytes : null),
      text: percent,
      number: true,
    },
    { title: "What it is", value: (row) => row.note ?? "" },
  ];
  return [
    card("Peak of a device", memoryBar(memory)),
    table({ title: "Memory at the peak by role", columns, rows: memory.roles ?? [] }),
    card("Over one step of one device", memoryCourse(memory)),
  ];
}

/** Returns the bar of the peak against the device's capacity, with the cap marked. */
export function memoryBar(memory) {
  if (!memory) return emptyText("This plan has no estimate of memory.");
  const marks = [
    { name: "cap", amount: memory.cap_bytes, dashed: true },
    { name: "capacity", amount: memory.capacity_bytes, dashed: false },
  ].filter((mark) => mark.amount != null);
  const parts = (memory.roles ?? []).map((role) => ({
    name: role.label,
    amount: role.bytes,
    note: role.note,
    variable: memoryVariable(role.role),
  }));
  const whole = Math.max(memory.peak_bytes, memory.capacity_bytes ?? 0, memory.cap_bytes ?? 0);
  return stackedBar({ label: "Memory at the peak", parts, whole, format: bytes, marks });
}

function memoryCourse(memory) {
  const curve = memory.curve ?? [];
  if (curve.length < 2) return emptyText("This plan has no course of memory over the step.");
  const option = ({ colour }) => ({
    grid: { left: 64, right: 24, top: 24, bottom: 28 },
    tooltip: areaTooltip(memory, colour),
    xAxis: axisLook(colour, { type: "value", max: curve.at(-1).at_s, axisLabel: { formatter: seconds } }),
    yAxis: axisLook(colour, { type: "value", axisLabel: { formatter: bytes } }),
    series: memoryAreas(memory, colour),
  });
  return [
    chart({
      label: "Memory over one step, by role, as stacked areas; the table below has the numbers",
      height: 320,
      option,
    }),
    details("Table", courseTable(memory)),
  ];
}

/**
 * Returns ECharts' series of the memory over a step, the role that changes least at the bottom. Each area reaches from
 * zero to the sum of its role and those below it, and the highest is painted first: ECharts' own stacks take points of
 * equal time for one.
 */
export function memoryAreas(memory, colour, more = {}) {
  const roles = courseRoles(memory);
  const totals = memory.curve.map(() => 0);
  const areas = roles.map((role) => ({
    type: "line",
    name: role.label,
    data: memory.curve.map((point, index) => [point.at_s, (totals[index] += point.bytes[role.role] ?? 0)]),
    symbol: "none",
    lineStyle: { width: 0 },
    areaStyle: { opacity: 1 },
    color: colour(memoryVariable(role.role)),
    emphasis: { disabled: true },
    ...more,
  }));
  if (areas.length && memory.cap_bytes != null) areas[0].markLine = capLine(memory.cap_bytes, colour);
  return areas.reverse();
}

/** Returns ECharts' tooltip of the memory at a time. */
export function areaTooltip(memory, colour) {
  const tell = (points) => {
    const point = memory.curve[points[0].dataIndex];
    const rows = courseRoles(memory)
      .reverse()
      .map((role) => [role.label, bytes(point.bytes[role.role] ?? 0), colour(memoryVariable(role.role))]);
    return tooltipContent(`${seconds(point.at_s)}, ${point.label}`, [["in all", bytes(sum(point.bytes))], ...rows]);
  };
  return {
    trigger: "axis",
    backgroundColor: colour("--surface"),
    borderColor: colour("--line-strong"),
    textStyle: { color: colour("--text"), fontSize: 13 },
    confine: true,
    formatter: tell,
  };
}

function capLine(cap, colour) {
  const label = {
    formatter: `cap ${bytes(cap)}`,
    position: "insideEndTop",
    color: colour("--text"),
    backgroundColor: colour("--surface"),
    padding: 2,
  };
  return {
    silent: true,
    symbol: "none",
    lineStyle: { color: colour("--text"), type: "dashed" },
    label,
    data: [{ yAxis: cap }],
  };
}

function courseTable(memory) {
  const columns = [
    { title: "At", value: (row) => row.at_s, text: seconds, number: true },
    { title: "When", value: (row) => row.label },
    { title: "In all", value: (row) => sum(row.bytes), text: bytes, number: true },
    ...courseRoles(memory).map((role) => ({
      title: role.label,
      value: (row) => row.bytes[role.role] ?? 0,
      text: bytes,
      number: true,
    })),
  ];
  return table({ title: "Memory over the step", columns, rows: memory.curve, limit: 50 });
}

/** Returns the roles that occur in the course of memory, the one that changes least first. */
function courseRoles({ roles = [], curve }) {
  const labels = new Map(roles.map(({ role, label }) => [role, label]));
  const extremes = new Map();
  for (const { bytes: amounts } of curve) {
    for (const [role, amount] of Object.entries(amounts)) {
      const [least, most] = extremes.get(role) ?? [amount, amount];
      extremes.set(role, [Math.min(least, amount), Math.max(most, amount)]);
    }
  }
  const spread = ([, [least, most]]) => most - least;
  const steadyFirst = [...extremes]
    .filter(([, [, most]]) => most > 0)
    .sort((one, other) => spread(one) - spread(other));
  return steadyFirst.map(([role]) => ({ role, label: labels.get(role) ?? role.replaceAll("_", " ") }));
}

function sum(amounts) {
  return Object.values(amounts).reduce((total, amount) => total + amount, 0);
}
