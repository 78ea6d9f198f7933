/** The list of jobs, the newest first, with a filter by status. */

import { element } from "shardplan/dom.js";
import { moment, seconds } from "shardplan/format.js";
import { table } from "shardplan/table.js";

const STATUSES = ["queued", "running", "succeeded", "failed", "cancelled"];
const PAGE = 50;

/** Returns the page of all jobs; `?status=` filters it. */
export async function plansPage({ api, state }) {
  const list = element("div", {});
  const node = element("div", {}, element("h1", {}, "Plans"), element("p", {}, statusSelect(state)), list);
  let jobs = [];

  async function load(before) {
    const status = state.get("status");
    const query = new URLSearchParams({ limit: PAGE, ...(status ? { status } : {}), ...(before ? { before } : {}) });
    const page = await api.get(`/v1/plans?${query}`);
    jobs = before ? [...jobs, ...page.jobs] : page.jobs;
    const more = page.next && element("button", { type: "button", on: { click: () => load(page.next) } }, "Older jobs");
    list.replaceChildren(
      jobTable("Jobs", jobs, status ? `No job is ${status}.` : "No job yet. Start with a new plan."),
      ...(more ? [more] : []),
    );
  }

  let loadedFor;
  await load();
  loadedFor = state.get("status");
  const update = () => {
    if (state.get("status") === loadedFor) return;
    loadedFor = state.get("status");
    load();
  };
  return { title: "Plans", node, update };
}

/** Returns the list of some jobs in short, each with a link to its page and its status. */
export function jobList(jobs) {
  const entry = (job) =>
    element("li", {}, element("a", { href: `/plans/${job.id}` }, job.label), statusBadge(job.status));
  return element("ul", { class: "job-list" }, jobs.map(entry));
}

/** Returns the table of some jobs, each with a link to its page. */
function jobTable(title, jobs, empty) {
  const columns = [
    {
      title: "Job",
      value: (job) => job.label,
      text: (label, job) => element("a", { href: `/plans/${job.id}` }, label),
    },
    { title: "Status", value: (job) => job.status, text: statusBadge },
    { title: "Queued", value: (job) => job.queued_at, text: moment, number: true },
    {
      title: "Took",
      value: (job) => (job.started_at && job.finished_at ? job.finished_at - job.started_at : null),
      text: seconds,
      number: true,
    },
    { title: "Error", value: (job) => job.error ?? "" },
  ];
  return table({ title, level: 2, columns, rows: jobs, empty, limit: 500 });
}

function statusBadge(status) {
  return element("span", { class: `badge ${status}` }, status);
}

function statusSelect(state) {
  const chosen = state.get("status");
  const option = (value, text) => element("option", { value, selected: value === (chosen ?? "") }, text);
  const choose = (event) => state.go({ status: event.target.value || null });
  return element(
    "label",
    { class: "inline" },
    "Status ",
    element(
      "select",
      { on: { change: choose } },
      option("", "all"),
      STATUSES.map((status) => option(status, status)),
    ),
  );
}
