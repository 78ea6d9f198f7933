/** The progress of a job: meshes that are done, and the incumbent and the lower bound as they close on each other. */

import { axisLook, chart } from "shardplan/chart.js";
import { details, element, pageCard } from "shardplan/dom.js";
import { percent, seconds, whole } from "shardplan/format.js";
import { problemBox } from "shardplan/pages/problem_box.js";
import { table } from "shardplan/table.js";

const DRAWN_EVERY_MS = 250;

/** Returns the page of a job that waits or runs; when the job ends its plan opens by itself. */
export async function progressPage({ api, navigate }, id) {
  const seen = { points: [], stage: "queued", mesh: "", done: 0, total: 0, latest: {} };
  const stopped = new AbortController();
  const summary = await summaryOf(api, id);
  const started = summary?.started_at ?? summary?.queued_at ?? Date.now() / 1000;
  const parts = {
    stage: element("p", { class: "stage", role: "status" }),
    meter: element("progress", { "aria-label": "Meshes done" }),
    count: element("span", {}),
    facts: element("dl", { class: "facts" }),
    problems: element("div", {}),
  };
  const lines = closingLines(seen);
  const clock = setInterval(() => drawFacts(parts, seen, started), 1000);
  let drawing = null;

  function draw() {
    drawing = null;
    parts.stage.textContent = stageText(seen);
    parts.count.textContent = seen.total ? `${seen.done} of ${seen.total} meshes` : "";
    if (seen.total) Object.assign(parts.meter, { max: seen.total, value: seen.done });
    drawFacts(parts, seen, started);
    lines.draw();
  }

  async function follow() {
    try {
      for await (const event of api.events(id, stopped.signal)) {
        note(seen, event);
        drawing ??= setTimeout(draw, DRAWN_EVERY_MS);
      }
      if (!stopped.signal.aborted) navigate(location.href, { replace: true, again: true });
    } catch (error) {
      if (!stopped.signal.aborted) parts.problems.replaceChildren(problemBox(error));
    }
  }

  const cancel = () => api.cancel(id).catch((error) => parts.problems.replaceChildren(problemBox(error)));
  const stop = () => {
    stopped.abort();
    clearInterval(clock);
    clearTimeout(drawing);
  };
  draw();
  follow();
  return { title: "Planning", node: page(summary, parts, lines, cancel), stop };
}

function page(summary, parts, lines, cancel) {
  return element(
    "div",
    {},
    element("h1", {}, "Planning"),
    element("p", { class: "quiet" }, summary?.label ?? ""),
    element(
      "section",
      { class: "card progress" },
      parts.stage,
      element("p", { class: "meter" }, parts.meter, parts.count),
      parts.facts,
      element(
        "p",
        { class: "actions" },
        element("button", { type: "button", on: { click: cancel } }, "Cancel the job"),
      ),
    ),
    parts.problems,
    pageCard("Incumbent and lower bound", lines.node),
  );
}

/** Takes an event into what was seen. */
function note(seen, event) {
  seen.stage = event.stage;
  seen.mesh = event.mesh ?? "";
  if (event.meshes) [seen.done, seen.total] = [Math.max(seen.done, event.mesh_number ?? 0), event.meshes];
  for (const name of ["step_time_s", "bound_s", "gap", "tasks_done", "nodes_open"]) {
    if (event[name] != null) seen.latest[name] = event[name];
  }
  if (event.step_time_s != null || event.bound_s != null) {
    seen.points.push({
      number: seen.points.length + 1,
      stage: event.stage,
      incumbent: seen.latest.step_time_s ?? null,
      bound: seen.latest.bound_s ?? null,
    });
  }
}

function stageText({ stage, mesh }) {
  const name = stage === "best" ? "faster plan found on" : stage;
  const text = mesh ? `${name} ${mesh}` : name;
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function drawFacts({ facts }, { latest }, started) {
  const elapsed = Math.max(0, Date.now() / 1000 - started);
  const rows = [
    ["Elapsed", `${whole(elapsed)} s`],
    ["Incumbent", latest.step_time_s == null ? "none yet" : seconds(latest.step_time_s)],
    ["Lower bound", latest.bound_s == null ? "none yet" : seconds(latest.bound_s)],
    ["Gap", percent(latest.gap)],
    ["Nodes expanded", whole(latest.tasks_done)],
    ["Nodes open", whole(latest.nodes_open)],
  ];
  facts.replaceChildren(
    ...rows.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
}

function closingLines(seen) {
  let instance = null;
  const line = (name, key) => ({
    name,
    type: "line",
    step: "end",
    symbol: "none",
    lineStyle: { width: 2, type: key === "bound" ? "dashed" : "solid" },
    data: seen.points.map((point) => [point.number, point[key]]),
  });
  const series = () => [line("incumbent", "incumbent"), line("lower bound", "bound")];
  const option = ({ colour }) => ({
    color: [colour("--accent"), colour("--text-quiet")],
    legend: { top: 0, textStyle: { color: colour("--text") } },
    grid: { left: 64, right: 16, top: 32, bottom: 40 },
    tooltip: {
      trigger: "axis",
      valueFormatter: seconds,
      backgroundColor: colour("--surface"),
      textStyle: { color: colour("--text") },
    },
    xAxis: axisLook(colour, {
      type: "value",
      name: "event of the search",
      nameLocation: "middle",
      nameGap: 26,
      minInterval: 1,
      min: 1,
      max: ({ max }) => Math.max(2, max),
    }),
    yAxis: axisLook(colour, { type: "value", scale: true, axisLabel: { formatter: seconds } }),
    series: series(),
  });
  const label =
    "Step time of the incumbent and the lower bound by event of the search; the table below has the numbers";
  const columns = [
    { title: "Event", value: (row) => row.number, number: true },
    { title: "Stage", value: (row) => row.stage },
    { title: "Incumbent", value: (row) => row.incumbent, text: seconds, number: true },
    { title: "Lower bound", value: (row) => row.bound, text: seconds, number: true },
  ];
  const rows = element("div", {});
  const fill = () =>
    rows.replaceChildren(table({ title: "Events of the search", columns, rows: [...seen.points], empty: "None yet." }));
  const list = details("Table", rows);
  list.addEventListener("toggle", fill);
  return {
    node: element(
      "div",
      {},
      chart({
        label,
        height: 260,
        option,
        onReady: (ready) => {
          instance = ready;
        },
      }),
      list,
    ),
    draw() {
      instance?.setOption({ series: series() });
      if (list.open) fill();
    },
  };
}

async function summaryOf(api, id) {
  const { jobs } = await api.get("/v1/plans?limit=50");
  return jobs.find((job) => job.id === id) ?? null;
}
