/** The form of a planning request. */

import { Problem } from "shardplan/api.js";
import { details, element } from "shardplan/dom.js";
import { clusterInput } from "shardplan/pages/cluster_input.js";
import { field } from "shardplan/pages/field.js";
import { ADVANCED_FIELDS, JOB_FIELDS, LIMIT_FIELDS } from "shardplan/pages/job_fields.js";
import { modelInput } from "shardplan/pages/model_input.js";
import { problemBox } from "shardplan/pages/problem_box.js";

/**
 * Returns the form of a whole request.
 * @param {{models: Array, devices: Array}} catalogue
 * @param {Object} request values at first
 * @param {function(Object): Promise} send submits the request
 */
export function planForm(catalogue, request, send) {
  const [job, limits, advanced] = [JOB_FIELDS, LIMIT_FIELDS, ADVANCED_FIELDS].map((specs) =>
    specs.map((spec) => field(spec, request[spec.name], "plan")),
  );
  const [model, cluster] = [
    modelInput(catalogue.models, request.model),
    clusterInput(catalogue.devices, request.cluster),
  ];
  const more = details(
    "Advanced",
    element(
      "div",
      { class: "fields" },
      advanced.map((item) => item.node),
    ),
  );
  more.open = ADVANCED_FIELDS.some(({ name, standard }) => isSet(request[name]) && request[name] !== standard);
  const nodes = [
    model.node,
    cluster.node,
    element(
      "div",
      { class: "fields" },
      [...job, ...limits].map((item) => item.node),
    ),
    more,
  ];
  const kept = Object.fromEntries(
    Object.entries(request).filter(
      ([name]) => ![model, cluster, ...job, ...limits, ...advanced].some((item) => item.name === name),
    ),
  );
  return checkedForm({
    fields: [model, cluster, ...job, ...limits, ...advanced],
    nodes,
    button: "Plan",
    send: (values) => send({ ...kept, ...values }),
  });
}

/**
 * Returns a form that checks its fields, submits their values, and shows what the server finds wrong at its field.
 * @param {Object} form
 * @param {Array<Object>} form.fields as those of field.js
 * @param {Array<Node>} form.nodes
 * @param {string} form.button text of the button that submits
 * @param {function(Object): Promise} form.send takes the values that were given
 */
export function checkedForm({ fields, nodes, button, send }) {
  const problems = element("div", {});
  const submit = element("button", { type: "submit", class: "primary" }, button);

  async function submitted(event) {
    event.preventDefault();
    problems.replaceChildren();
    const faults = new Map(fields.map((item) => [item.name, item.fault()]).filter(([, fault]) => fault));
    if (showFaults(fields, faults)) return;
    submit.disabled = true;
    try {
      const values = fields.map((item) => [item.name, item.read()]).filter(([, value]) => value !== undefined);
      await send(Object.fromEntries(values));
    } catch (error) {
      if (!(error instanceof Problem && showFaults(fields, error.fields())))
        problems.replaceChildren(problemBox(error));
    } finally {
      submit.disabled = false;
    }
  }

  return element(
    "form",
    { class: "plan-form", novalidate: true, on: { submit: submitted } },
    nodes,
    problems,
    element("p", { class: "submit" }, submit),
  );
}

/** Marks the fields at fault, focuses the first one, and returns whether every fault belongs to a field. */
function showFaults(fields, faults) {
  for (const item of fields) item.mark(faults.get(item.name) ?? "");
  const first = fields.find((item) => faults.get(item.name));
  if (!first) return false;
  const hidden = first.node.closest("details:not([open])");
  if (hidden) hidden.open = true;
  first.focus();
  return [...faults.keys()].every((name) => fields.some((item) => item.name === name));
}

function isSet(value) {
  return Array.isArray(value) ? value.length > 0 : value != null;
}
