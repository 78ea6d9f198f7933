/** Compare: where this plan and another differ, then their time and memory as bars on one scale. */

import { stackedBar } from "shardplan/bars.js";
import { memoryVariable, timeVariable } from "shardplan/colours.js";
import { card, element, emptyText } from "shardplan/dom.js";
import { anyText, bytes, seconds, signed } from "shardplan/format.js";
import { problemBox } from "shardplan/pages/problem_box.js";
import { table } from "shardplan/table.js";

export const compare = { name: "compare", title: "Compare", keys: ["compare"], draw };

function draw(view, { api, state, job }) {
  const node = element("div", {}, element("p", { class: "loading", role: "status" }, "Loading\u2026"));
  fill(node, view, { api, state, id: job.id }).catch((error) => node.replaceChildren(problemBox(error)));
  return node;
}

async function fill(node, view, { api, state, id }) {
  const other = state.get("compare");
  const { jobs } = await api.get("/v1/plans?status=succeeded&limit=50");
  const choice = otherSelect(
    jobs.filter((job) => job.id !== id),
    other,
    state,
  );
  if (!other) return node.replaceChildren(choice, emptyText("Choose another finished plan to compare this one with."));
  const [differences, otherView] = await Promise.all([
    api.post("/v1/plans/diff", { left: id, right: other }),
    api.view(other),
  ]);
  const equal = differences.equal ? emptyText("The two plans are the same.") : null;
  node.replaceChildren(
    ...[choice, legendOf(view, otherView), equal, ...differenceTables(differences), bars(view, otherView)].filter(
      Boolean,
    ),
  );
}

function otherSelect(jobs, other, state) {
  const options = jobs.map((job) =>
    element("option", { value: job.id, selected: job.id === other }, `${job.label} (${job.id.slice(0, 6)})`),
  );
  if (other && !jobs.some((job) => job.id === other))
    options.unshift(element("option", { value: other, selected: true }, other));
  const choose = (event) => state.go({ compare: event.target.value || null });
  return element(
    "p",
    {},
    element(
      "label",
      { class: "inline" },
      "Compare with ",
      element("select", { on: { change: choose } }, element("option", { value: "" }, "choose a plan"), options),
    ),
  );
}

function legendOf(view, other) {
  const entry = (name, plan) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, `${plan.title}; ${plan.subtitle}`));
  return element("dl", { class: "facts wide" }, entry("This plan", view), entry("The other", other));
}

function differenceTables({ settings, seconds: times, bytes: sizes, layouts }) {
  const texts = [
    { title: "Field", value: (row) => row.field },
    { title: "Key", value: (row) => row.key },
    { title: "This plan", value: (row) => row.left, text: anyText },
    { title: "The other", value: (row) => row.right, text: anyText },
  ];
  const numbers = (format) => [
    { title: "What", value: (row) => row.key || row.field },
    { title: "This plan", value: (row) => row.left, text: format, number: true },
    { title: "The other", value: (row) => row.right, text: format, number: true },
    {
      title: "Difference",
      value: (row) => (row.left == null || row.right == null ? null : row.right - row.left),
      text: (value) => signed(value, format),
      number: true,
    },
  ];
  const groups = [
    ["Settings that differ", texts, settings],
    ["Seconds that differ", numbers(seconds), times],
    ["Bytes that differ", numbers(bytes), sizes],
    ["Layouts that differ", texts, layouts],
  ];
  return groups
    .filter(([, , rows]) => rows.length)
    .map(([title, columns, rows]) => table({ title, columns, rows: rows.flatMap(membersThatDiffer), limit: 25 }));
}

/** Returns one row for each member of two objects that differs, at any depth; the row itself for any other values. */
function membersThatDiffer({ field, key, left, right }) {
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  if (!isObject(left) || !isObject(right)) return [{ field, key, left: named(left), right: named(right) }];
  const names = [...new Set([...Object.keys(left), ...Object.keys(right)])].filter(
    (name) => JSON.stringify(left[name]) !== JSON.stringify(right[name]),
  );
  return names.flatMap((name) =>
    membersThatDiffer({ field, key: key ? `${key}.${name}` : name, left: left[name], right: right[name] }),
  );
}

/** Returns the name of a value that has one, such as a device; else the value. */
function named(value) {
  return value?.name ?? value;
}

function bars(view, other) {
  const plans = [
    ["This plan", view],
    ["The other", other],
  ];
  const longest = Math.max(...plans.map(([, plan]) => plan.time?.step_s ?? 0));
  const largest = Math.max(...plans.map(([, plan]) => plan.memory?.peak_bytes ?? 0));
  const time = ([name, { time: own }]) =>
    own && [
      element("h4", {}, `${name}: ${seconds(own.step_s)}`),
      stackedBar({
        label: `Step of ${name}`,
        whole: longest,
        format: seconds,
        parts: own.parts.map((part) => ({ name: part.name, amount: part.seconds, variable: timeVariable(part.name) })),
      }),
    ];
  const memory = ([name, { memory: own }]) =>
    own && [
      element("h4", {}, `${name}: ${bytes(own.peak_bytes)}`),
      stackedBar({
        label: `Memory of ${name}`,
        whole: largest,
        format: bytes,
        parts: own.roles.map((role) => ({ name: role.label, amount: role.bytes, variable: memoryVariable(role.role) })),
      }),
    ];
  return element(
    "div",
    { class: "cards" },
    card("Time of a step", plans.map(time)),
    card("Memory at the peak", plans.map(memory)),
  );
}
