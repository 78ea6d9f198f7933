/** The page of a job: its progress, its plan, or why it has none. */

import { rememberedRequest } from "shardplan/api.js";
import { element, pageCard, saveText } from "shardplan/dom.js";
import { anyText, bytes, seconds } from "shardplan/format.js";
import { compare } from "shardplan/pages/compare.js";
import { problemBox } from "shardplan/pages/problem_box.js";
import { progressPage } from "shardplan/pages/progress.js";
import { sweep } from "shardplan/pages/sweep.js";
import { whatIf } from "shardplan/pages/what_if.js";
import { planFrame } from "shardplan/plan_frame.js";
import { PLAN_VIEWS } from "shardplan/plan_views.js";

const VIEWS = [...PLAN_VIEWS, compare, sweep, whatIf];

/** Returns the page of the job `id`. */
export async function jobPage(context, id) {
  const job = await context.api.get(`/v1/plans/${encodeURIComponent(id)}`);
  if (job.status === "queued" || job.status === "running") return progressPage(context, id);
  return job.status === "succeeded" ? planPage(context, job) : failurePage(job);
}

async function planPage(context, job) {
  const answer = await context.api.view(job.id);
  const view = { ...answer, request: wholeRequest(job.id, answer.request) };
  const own = { ...context, job, formLink: (changes) => formLink(job.id, changes) };
  const frame = planFrame(view, { views: VIEWS, context: own, actions: downloads(context.api, job) });
  return { title: view.title, node: frame.node, update: frame.update };
}

/** Returns the request of a job; the server leaves out a traced graph, so it is then null unless this tab submitted it. */
function wholeRequest(id, request) {
  const lacksGraph = request?.model !== null && typeof request?.model === "object" && request.model.graph === null;
  return lacksGraph ? rememberedRequest(id) : request;
}

function failurePage(job) {
  const error = job.error ?? { title: job.status === "cancelled" ? "The job was cancelled" : "The job failed" };
  const again = element("a", { class: "button primary", href: `/?from=${job.id}` }, "Change and try again");
  return {
    title: error.title,
    node: element("div", {}, element("h1", {}, "No plan"), problemBox(error, again), figures(error)),
  };
}

/** Returns the figures that an error carries, such as the least memory that a plan needs. */
function figures(error) {
  const shown = Object.entries(error).filter(
    ([name, value]) => !["type", "title", "detail", "what_to_do", "status", "errors"].includes(name) && value != null,
  );
  if (!shown.length) return null;
  const fact = ([name, value]) =>
    element("div", {}, element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, figureText(name, value)));
  return pageCard("Figures", element("dl", { class: "facts" }, shown.map(fact)));
}

function figureText(name, value) {
  if (typeof value !== "number") return anyText(value);
  if (name.endsWith("_bytes")) return bytes(value);
  return name.endsWith("_s") ? seconds(value) : anyText(value);
}

/** Returns the link to the form with the request of a job, on another `mesh` or with more `pins`. */
function formLink(id, { mesh, pins = [] }) {
  const query = new URLSearchParams({ from: id, ...(mesh ? { mesh } : {}) });
  for (const pin of pins) query.append("pin", pin);
  return `/?${query}`;
}

function downloads(api, job) {
  const problems = element("span", { class: "error", role: "status" });
  const button = (name, text) => {
    const save = () =>
      text().catch((error) => {
        problems.textContent = error.message;
      });
    return element(
      "button",
      { type: "button", class: "quiet", "aria-label": `Download ${name}`, on: { click: save } },
      name,
    );
  };
  const file = (path, name, type) => async () => saveText(await api.file(`/v1/plans/${job.id}/${path}`), name, type);
  return [
    button("plan.json", async () => saveText(JSON.stringify(job.plan, null, 1), "plan.json", "application/json")),
    button("report", file("report", "report.html", "text/html")),
    button("trace", file("trace", "trace.json", "application/json")),
    exportSelect(api, job, problems),
    problems,
  ];
}

/** Frameworks whose configuration a plan can be saved as. */
const FRAMEWORKS = [
  ["torch", "torch script"],
  ["torchtitan", "torchtitan"],
  ["megatron", "Megatron-LM"],
  ["megatron-bridge", "Megatron-Bridge"],
  ["accelerate", "accelerate"],
  ["deepspeed", "DeepSpeed"],
  ["transformers", "transformers"],
  ["vllm", "vLLM"],
];

/** Returns a choice of frameworks that saves the plan as the chosen one's configuration, and says what it loses. */
function exportSelect(api, job, message) {
  const save = async ({ target }) => {
    const name = target.value;
    target.value = "";
    try {
      const answer = JSON.parse(await api.file(`/v1/plans/${job.id}/export?to=${name}`));
      saveText(answer.text, answer.file, "text/plain");
      const unsaid = answer.rows.filter((row) => row.outcome !== "expressed");
      message.textContent = unsaid.map((row) => `${row.field} ${row.outcome}: ${row.detail}`).join("; ");
    } catch (error) {
      message.textContent = error.message;
    }
  };
  return element(
    "select",
    { "aria-label": "Export for a framework", on: { change: save } },
    element("option", { value: "" }, "export for ..."),
    FRAMEWORKS.map(([name, title]) => element("option", { value: name }, title)),
  );
}
