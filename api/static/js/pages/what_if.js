/** What-if: the job with another cap, network, batch or pins, planned again and compared with this plan. */

import { element, emptyText } from "shardplan/dom.js";
import { simpleCluster } from "shardplan/pages/cluster_input.js";
import { field } from "shardplan/pages/field.js";
import { JOB_FIELDS, LIMIT_FIELDS } from "shardplan/pages/job_fields.js";
import { checkedForm } from "shardplan/pages/plan_form.js";

export const whatIf = { name: "what-if", title: "What if", draw };

const LINKS = [
  {
    name: "inter_node",
    label: "Network between nodes",
    hint: "GB/s of each card; empty: as it is",
    type: "number",
    above: 0,
  },
  {
    name: "intra_node",
    label: "Link inside a node",
    hint: "GB/s of each device; empty: as it is",
    type: "number",
    above: 0,
  },
];

function draw({ request }, { api, navigate, job }) {
  if (!request) return emptyText("The request of this plan is not known, so it cannot be changed.");
  const kept = JOB_FIELDS.filter(({ name }) => name === "batch" || name === "seq");
  const fields = [...LIMIT_FIELDS, ...kept].map((spec) => field(spec, request[spec.name], "what-if"));
  const links = linkable(request.cluster) ? LINKS.map((spec) => field(spec, undefined, "what-if")) : [];
  const changeable = [...LIMIT_FIELDS, ...kept].map((spec) => spec.name);

  async function send({ inter_node, intra_node, ...values }) {
    const unchanged = Object.fromEntries(Object.entries(request).filter(([name]) => !changeable.includes(name)));
    const cluster = changedCluster(request.cluster, { inter_node, intra_node });
    const { id } = await api.submit({ ...unchanged, ...values, cluster });
    navigate(`/plans/${id}?view=compare&compare=${job.id}`);
  }

  const all = [...fields, ...links];
  return [
    element("p", {}, "Change what you like; the new plan opens beside this one."),
    checkedForm({
      fields: all,
      nodes: [
        element(
          "div",
          { class: "fields" },
          all.map((item) => item.node),
        ),
      ],
      button: "Plan again",
      send,
    }),
    element("p", {}, element("a", { href: `/?from=${job.id}` }, "All fields of the job")),
  ];
}

function linkable(cluster) {
  return simpleCluster(cluster) !== null || (typeof cluster === "object" && cluster !== null);
}

/** Returns the cluster with other bandwidths, given in GB/s. */
function changedCluster(cluster, links) {
  const changed = Object.entries(links).filter(([, rate]) => rate !== undefined);
  if (!changed.length) return cluster;
  const simple = simpleCluster(cluster);
  const base = simple ? { nodes: simple.nodes, devices_per_node: simple.perNode, device: simple.device } : cluster;
  const link = ([name, rate]) => [
    name,
    { ...(typeof base[name] === "object" ? base[name] : {}), bandwidth_bytes_per_s: rate * 1e9 },
  ];
  return { ...base, ...Object.fromEntries(changed.map(link)) };
}
