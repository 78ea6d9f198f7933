/** The page of a new plan: the form, example jobs, and the latest jobs. */

import { rememberedRequest } from "shardplan/api.js";
import { element, emptyText, pageCard } from "shardplan/dom.js";
import { planForm } from "shardplan/pages/plan_form.js";
import { jobList } from "shardplan/pages/plans.js";
import { problemBox } from "shardplan/pages/problem_box.js";

const LATEST = 5;
const EXAMPLES = [
  {
    title: "Train Llama 3.1 8B on 8 H100",
    text: "64 sequences of 4,096 tokens a step",
    request: { model: "llama-3.1-8b", cluster: "1x8xh100-sxm-80gb", batch: 64, seq: 4096 },
  },
  {
    title: "Train Mixtral 8x7B on 2 nodes of 8 H200",
    text: "a mixture of experts, 128 sequences of 4,096 tokens",
    request: { model: "mixtral-8x7b", cluster: "2x8xh200-sxm-141gb", batch: 128, seq: 4096 },
  },
  {
    title: "Serve Llama 3.1 70B on 8 MI300X",
    text: "decode of 64 sequences with 8,192 tokens in the cache",
    request: { model: "llama-3.1-70b", cluster: "1x8xmi300x-192gb", batch: 64, seq: 8192, phase: "decode" },
  },
];

/** Returns the page; `?from=ID` starts from the request of a job, `mesh` and `pin` add to it. */
export async function newPlanPage({ api, navigate }) {
  const query = new URLSearchParams(location.search);
  const reads = [
    api.get("/v1/models"),
    api.get("/v1/clusters"),
    requestOf(api, query),
    api.get(`/v1/plans?limit=${LATEST}`),
  ];
  const [{ models }, { devices }, request, latest] = await Promise.all(reads);
  const send = async (values) => navigate(`/plans/${(await api.submit(values)).id}`);
  const form = planForm(
    { models, devices },
    query.has("from") ? request : { ...EXAMPLES[0].request, ...request },
    send,
  );
  return {
    title: "New plan",
    node: element(
      "div",
      {},
      element("h1", {}, query.has("from") ? "Change and plan again" : "New plan"),
      element(
        "div",
        { class: "start" },
        form,
        element(
          "aside",
          { "aria-label": "Examples and latest jobs" },
          examples(send),
          pageCard("Latest jobs", latest.jobs.length ? jobList(latest.jobs) : emptyText("None yet.")),
        ),
      ),
    ),
  };
}

function examples(send) {
  const problems = element("div", {});
  const start = (request) => () => send(request).catch((error) => problems.replaceChildren(problemBox(error)));
  const button = ({ title, text, request }) =>
    element(
      "button",
      { type: "button", class: "example", on: { click: start(request) } },
      element("strong", {}, title),
      element("span", {}, text),
    );
  return pageCard(
    "Examples",
    element("p", { class: "quiet" }, "One click plans it."),
    element("div", { class: "examples" }, EXAMPLES.map(button)),
    problems,
  );
}

/** Returns the request that the URL starts from: that of a job, with the mesh, cluster and pins that the URL adds. */
async function requestOf(api, query) {
  const id = query.get("from");
  const path = `/v1/plans/${encodeURIComponent(id ?? "")}/request`;
  const earlier = id ? (rememberedRequest(id) ?? (await api.get(path).catch(() => ({})))) : {};
  const added = Object.fromEntries(
    ["mesh", "cluster"].filter((name) => query.has(name)).map((name) => [name, query.get(name)]),
  );
  return { ...earlier, ...added, pins: [...(earlier.pins ?? []), ...query.getAll("pin")] };
}
