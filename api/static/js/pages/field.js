/** One field of a form: its label, control, hint and error, its value, and what is wrong with it. */

import { element } from "shardplan/dom.js";

/**
 * Returns a field.
 * @param {Object} spec as in job_fields.js
 * @param {*} value its value at first; undefined: its standard value
 * @param {string} prefix of the ids, unique in the page
 * @returns {{name: string, node: Node, read: function(): *, fault: function(): string, mark: function(string), focus: function()}}
 *   `read` returns the value, undefined where it is the standard one; `fault` what is wrong with it; `mark` shows an
 *   error, "" none
 */
export function field(spec, value, prefix) {
  const id = `${prefix}-${spec.name}`;
  const control = CONTROLS[spec.type](spec, value ?? spec.standard, id);
  const error = element("span", { class: "error", id: `${id}-error` });
  const hint = spec.hint ? element("span", { class: "hint", id: `${id}-hint` }, spec.hint) : null;
  control.node.setAttribute("aria-describedby", [hint && `${id}-hint`, `${id}-error`].filter(Boolean).join(" "));
  const mark = (text) => {
    error.textContent = text;
    if (text) control.node.setAttribute("aria-invalid", "true");
    else control.node.removeAttribute("aria-invalid");
  };
  const fault = () => control.fault?.() || "";
  control.node.addEventListener("input", () => mark(""));
  const label = spec.type === "checks" ? null : element("label", { for: id }, spec.label);
  return {
    name: spec.name,
    node: element(
      "div",
      { class: `field field-${spec.type}${spec.wide ? " wide" : ""}` },
      label,
      control.node,
      control.extra,
      hint,
      error,
    ),
    read: control.read,
    fault,
    mark,
    focus: () => (control.node.matches("fieldset") ? control.node.querySelector("input") : control.node).focus(),
  };
}

const CONTROLS = {
  integer: numberControl,
  number: numberControl,
  text: textControl,
  choice,
  lines,
  checks,
  switch: switchControl,
};

function numberControl(spec, value, id) {
  const node = element("input", {
    id,
    type: "text",
    inputmode: spec.type === "integer" ? "numeric" : "decimal",
    autocomplete: "off",
    value,
  });
  const number = () => Number(node.value.replaceAll(/[, _]/g, ""));
  const read = () => (node.value.trim() === "" || number() === spec.standard ? undefined : number());
  return { node, read, fault: () => (node.value.trim() === "" ? "" : numberFault(spec, number())) };
}

function numberFault({ type, min, max, above }, number) {
  if (Number.isNaN(number)) return "Write a number.";
  if (type === "integer" && !Number.isInteger(number)) return "Write a whole number.";
  if (min != null && number < min) return `Write a number of at least ${min}.`;
  if (above != null && number <= above) return `Write a number above ${above}.`;
  if (max != null && number > max) return `Write a number of at most ${max}.`;
  return "";
}

function textControl(spec, value, id) {
  const node = element("input", {
    id,
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    value,
    list: spec.suggestions ? `${id}-list` : null,
  });
  const extra = spec.suggestions
    ? element(
        "datalist",
        { id: `${id}-list` },
        spec.suggestions.map((text) => element("option", { value: text })),
      )
    : null;
  const fault = () => (spec.pattern && node.value.trim() && !spec.pattern.test(node.value.trim()) ? spec.wrong : "");
  return { node, extra, read: () => node.value.trim() || undefined, fault };
}

function choice(spec, value, id) {
  const options = spec.options.includes(value) ? spec.options : [value, ...spec.options];
  const node = element(
    "select",
    { id },
    options.map((text) => element("option", { value: text, selected: text === value }, text)),
  );
  return { node, read: () => (node.value === spec.standard ? undefined : node.value) };
}

function lines(spec, value, id) {
  const node = element("textarea", { id, rows: 3, spellcheck: "false" }, (value ?? []).join("\n"));
  const read = () =>
    node.value
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean);
  return { node, read: () => (read().length ? read() : undefined) };
}

function checks(spec, value, id) {
  const boxes = spec.options.map((text) =>
    element("input", { type: "checkbox", value: text, checked: (value ?? []).includes(text) }),
  );
  const node = element(
    "fieldset",
    { id },
    element("legend", {}, spec.label),
    boxes.map((box) => element("label", {}, box, ` ${box.value}`)),
  );
  const read = () => boxes.filter((box) => box.checked).map((box) => box.value);
  return { node, read: () => (read().length ? read() : undefined) };
}

function switchControl(spec, value, id) {
  const node = element("input", { id, type: "checkbox", checked: value });
  return { node, read: () => (node.checked === spec.standard ? undefined : node.checked) };
}
