/** The model of a request: a named one, a Hugging Face config.json, or a traced graph. */

import { element } from "shardplan/dom.js";
import { whole } from "shardplan/format.js";
import { alternatives } from "shardplan/pages/alternatives.js";

/**
 * Returns the field of the model; its members are those of field.js.
 * @param {Array<Object>} models of `GET /v1/models`
 * @param {string|Object} [value] the model of an earlier request
 */
export function modelInput(models, value) {
  return alternatives("model", "Model", [named(models, value), config(value), graph(value)]);
}

function named(models, value) {
  const known = models.map((model) => model.name);
  const names = typeof value === "string" && !known.includes(value) ? [value, ...known] : known;
  const about = (name) => {
    const longest = models.find((model) => model.name === name)?.max_seq;
    return longest ? `${name} (to ${whole(longest)} tokens)` : name;
  };
  const node = element(
    "select",
    { "aria-label": "Named model" },
    names.map((name) => element("option", { value: name, selected: name === value }, about(name))),
  );
  return {
    title: "Named",
    node,
    chosen: value == null || typeof value === "string",
    read: () => node.value,
    fault: () => "",
  };
}

function config(value) {
  const given = value?.hf_config;
  const node = element(
    "textarea",
    {
      rows: 8,
      spellcheck: "false",
      "aria-label": "Contents of config.json",
      placeholder: '{"model_type": "llama", ...}',
    },
    given ? JSON.stringify(given, null, 2) : "",
  );
  const fault = () => (parsed(node.value) ? "" : "Paste the contents of the model's config.json: one JSON object.");
  const read = () => ({ ...(given ? value : {}), hf_config: parsed(node.value) });
  return { title: "config.json", node, chosen: given != null, read, fault };
}

function graph(value) {
  let content = value?.graph ?? null;
  let wrong = "";
  const told = element(
    "p",
    { class: "hint" },
    content ? "The graph of the earlier plan is used." : "A file that planner.wire.codec.write_graph wrote.",
  );
  const load = async () => {
    const [file] = input.files;
    const data = parsed(file ? await file.text() : "");
    content = data?.graph ?? data;
    wrong = content ? "" : "The file is no JSON object.";
    told.textContent = wrong || `${file.name}, ${whole(file.size)} bytes`;
  };
  const input = element("input", {
    type: "file",
    accept: ".json,application/json",
    "aria-label": "Traced graph",
    on: { change: load },
  });
  const fault = () => (content ? wrong : "Choose the file of a traced graph.");
  return {
    title: "Traced graph",
    node: element("div", {}, input, told),
    chosen: value !== null && typeof value === "object" && "graph" in value,
    read: () => ({ graph: content }),
    fault,
  };
}

/** Returns the JSON object that `text` holds, null if it holds none. */
export function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
