/** The chart of a sweep: tokens per second and device against devices, or step time against memory. */

import { axisLook, chart, tooltipContent } from "shardplan/chart.js";
import { emptyText } from "shardplan/dom.js";
import { bytes, seconds, significant, whole } from "shardplan/format.js";

const AXES = {
  nodes: {
    x: { name: "devices", value: (row) => row.devices, text: whole },
    ys: [
      { name: "step time", value: (row) => row.step_s, text: seconds },
      { name: "tokens/s per device", value: (row) => row.rate, text: significant },
    ],
  },
  caps: {
    x: { name: "peak memory", value: (row) => row.peak_bytes, text: bytes },
    ys: [{ name: "step time", value: (row) => row.step_s, text: seconds }],
  },
};

/** Returns the chart of the points that have a plan. */
export function sweepChart(kind, rows) {
  if (!rows.length) return emptyText("No plan yet; the jobs run one after another.");
  const { x, ys } = AXES[kind];
  const sorted = [...rows].sort((one, other) => x.value(one) - x.value(other));
  const option = ({ colour }) => ({
    color: [colour("--accent"), colour("--text-quiet")],
    legend: { top: 0, textStyle: { color: colour("--text") } },
    grid: { left: 72, right: ys.length > 1 ? 72 : 24, top: 40, bottom: 48 },
    tooltip: {
      trigger: "item",
      formatter: ({ dataIndex }) => tip(sorted[dataIndex], x, ys),
      backgroundColor: colour("--surface"),
      textStyle: { color: colour("--text") },
      confine: true,
    },
    xAxis: axisLook(colour, {
      type: kind === "nodes" ? "log" : "value",
      logBase: 2,
      scale: true,
      name: x.name,
      nameLocation: "middle",
      nameGap: 30,
      axisLabel: { formatter: x.text },
    }),
    yAxis: ys.map((y, index) =>
      axisLook(colour, {
        type: "value",
        min: 0,
        name: y.name,
        axisLabel: { formatter: y.text },
        splitLine: { show: index === 0, lineStyle: { color: colour("--line") } },
      }),
    ),
    series: ys.map((y, index) => ({
      name: y.name,
      type: "line",
      yAxisIndex: index,
      symbol: index ? "diamond" : "circle",
      symbolSize: 11,
      lineStyle: { type: index ? "dashed" : "solid" },
      data: sorted.map((row) => [x.value(row), y.value(row)]),
    })),
  });
  const label = `${ys.map((y) => y.name).join(" and ")} against ${x.name}; the table below has the numbers`;
  return chart({ label, height: 320, option });
}

function tip(row, x, ys) {
  return tooltipContent(
    row.mesh,
    [x, ...ys].map((axis) => [axis.name, axis.text(axis.value(row))]),
  );
}
