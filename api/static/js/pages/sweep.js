/** Sweep: the job on other numbers of nodes, or under lower memory caps, each an ordinary job that links to its plan. */

import { card, element, emptyText } from "shardplan/dom.js";
import { bytes, dollars, seconds, significant, whole } from "shardplan/format.js";
import { problemBox } from "shardplan/pages/problem_box.js";
import { sweepChart } from "shardplan/pages/sweep_chart.js";
import { requestsOfSweep } from "shardplan/pages/sweep_requests.js";
import { priceInput, priceOf } from "shardplan/price.js";
import { table } from "shardplan/table.js";

export const sweep = { name: "sweep", title: "Sweep", keys: ["sweep"], draw };

const KINDS = { nodes: "Number of nodes", caps: "Memory caps" };

/** The state's `sweep` is the kind and the jobs, such as `nodes:0.5=ID,1=ID`: a sweep is opened again by its URL. */
function draw(view, { api, state, job }) {
  if (!view.request) return emptyText("The request of this plan is not known, so it cannot be varied.");
  const problems = element("div", {});
  const run = (kind) => async () => {
    try {
      const points = [];
      for (const { key, request } of requestsOfSweep(kind, view)) points.push([key, (await api.submit(request)).id]);
      state.go({ sweep: `${kind}:${points.map(([key, id]) => `${key}=${id}`).join(",")}` });
    } catch (error) {
      problems.replaceChildren(problemBox(error));
    }
  };
  const [kind, points] = pointsOf(state.get("sweep"));
  const buttons = Object.entries(KINDS).map(([name, title]) =>
    element("button", { type: "button", class: name === kind ? "primary" : null, on: { click: run(name) } }, title),
  );
  const count = { nodes: requestsOfSweep("nodes", view).length, caps: requestsOfSweep("caps", view).length };
  const about = element(
    "p",
    {},
    `Plans this job again on half, once, twice and four times the nodes (${count.nodes} jobs), or under 100, 85, 70, 55 and 40 % of the device's memory (${count.caps} jobs). All are ordinary jobs of this server.`,
  );
  const result = element("div", {});
  if (points.length) followSweep(kind, points, { api, result, own: job.id });
  return [about, element("p", { class: "actions no-print" }, buttons), problems, result];
}

function pointsOf(text) {
  const match = text?.match(/^(nodes|caps):(.+)$/);
  return match ? [match[1], match[2].split(",").map((point) => point.split("="))] : [null, []];
}

/** Follows the jobs of a sweep, and draws what is known of them whenever one ends. */
function followSweep(kind, points, { api, result, own }) {
  const body = element("div", {});
  const ended = new AbortController();
  const rows = points.map(([key, id]) => ({ key: Number(key), id, status: "waiting", own: id === own }));
  let perHour = null;
  const priced = priceInput((price) => {
    perHour = price;
    show();
  });
  result.append(priced, body);

  function show() {
    for (const row of rows) row.price = priceOf(row.step_s, row.devices, perHour);
    body.replaceChildren(
      card(
        KINDS[kind],
        sweepChart(
          kind,
          rows.filter((row) => row.step_s),
        ),
      ),
      sweepTable(kind, rows),
    );
  }

  async function follow(row) {
    const signal = {
      get aborted() {
        return ended.signal.aborted || !result.isConnected;
      },
    };
    await new Promise((resolve) => setTimeout(resolve, 0)); // until the view is in the page
    const answer = await api.ended(row.id, signal);
    Object.assign(row, figuresOf(answer));
    if (!signal.aborted) show();
  }

  show();
  Promise.all(rows.map(follow)).catch((error) => {
    ended.abort();
    body.replaceChildren(problemBox(error));
  });
}

function figuresOf({ status, plan, error }) {
  if (!plan?.estimate) return { status: error?.title ?? status };
  const devices = plan.mesh.shape.reduce((product, size) => product * size, 1);
  const { step_time_s: step, peak_memory_bytes: peak } = plan.estimate;
  const tokens = plan.job.batch * (plan.job.phase === "decode" ? 1 : plan.job.seq);
  return {
    status,
    devices,
    step_s: step,
    peak_bytes: peak,
    cap_bytes: plan.job.memory_bytes,
    rate: tokens / step / devices,
    mesh: plan.mesh.names.map((name, index) => `${name}=${plan.mesh.shape[index]}`).join(","),
  };
}

function sweepTable(kind, rows) {
  const first =
    kind === "nodes"
      ? { title: "Nodes, times this plan's", value: (row) => row.key, text: String, number: true }
      : { title: "Cap, % of memory", value: (row) => row.key, text: whole, number: true };
  const columns = [
    first,
    {
      title: "Plan",
      value: (row) => row.mesh ?? row.status,
      text: (text, row) => element("a", { href: `/plans/${row.id}` }, row.own ? `${text} (this plan)` : text),
    },
    { title: "Devices", value: (row) => row.devices, text: whole, number: true },
    { title: "Step", value: (row) => row.step_s, text: seconds, number: true },
    { title: "Tokens/s per device", value: (row) => row.rate, text: significant, number: true },
    { title: "Peak", value: (row) => row.peak_bytes, text: bytes, number: true },
    { title: "Cap", value: (row) => row.cap_bytes, text: bytes, number: true },
    { title: "Price of a step", value: (row) => row.price, text: dollars, number: true },
  ];
  return table({ title: `Sweep: ${KINDS[kind].toLowerCase()}`, columns, rows });
}
