/** The cluster of a request: nodes of devices that are chosen from cards, or written out. */

import { element } from "shardplan/dom.js";
import { bytes, flops } from "shardplan/format.js";
import { alternatives } from "shardplan/pages/alternatives.js";
import { parsed } from "shardplan/pages/model_input.js";

const SIMPLE = /^(\d+)x(\d+)x([^+]+)$/;
const FIRST = { nodes: 1, perNode: 8, device: "h100-sxm-80gb" };

/**
 * Returns the field of the cluster; its members are those of field.js.
 * @param {Array<Object>} devices of `GET /v1/clusters`
 * @param {string|Object} [value] the cluster of an earlier request
 */
export function clusterInput(devices, value) {
  const simple = simpleCluster(value);
  const known = value == null || devices.some((device) => device.name === simple?.device);
  return alternatives("cluster", "Cluster", [
    cards(devices, known ? (simple ?? FIRST) : FIRST, known),
    written(value, !known),
  ]);
}

/** Returns `{nodes, perNode, device}` of a cluster such as `4x8xh100-sxm-80gb`, null for any other. */
export function simpleCluster(value) {
  const match = typeof value === "string" ? value.trim().match(SIMPLE) : null;
  return match ? { nodes: Number(match[1]), perNode: Number(match[2]), device: match[3] } : null;
}

/** Returns what there is to know of a device in one line. */
export function deviceFacts(device) {
  const rate = device.peak_flops.bf16 ?? device.peak_flops.fp16;
  return `${bytes(device.memory_bytes)}, ${flops(rate, "FLOP/s")}`;
}

function cards(devices, { nodes, perNode, device }, chosen) {
  const count = (label, value) =>
    element(
      "label",
      {},
      `${label} `,
      element("input", { type: "text", inputmode: "numeric", autocomplete: "off", size: 5, value }),
    );
  const [nodesLabel, perNodeLabel] = [count("Nodes", nodes), count("Devices per node", perNode)];
  const card = (item) =>
    element(
      "label",
      { class: "device-card" },
      element("input", { type: "radio", name: "device", value: item.name, checked: item.name === device }),
      element("strong", {}, item.name),
      element("span", {}, deviceFacts(item)),
      element("small", {}, `${item.intra_node}, ${item.inter_node}`),
    );
  const list = element("div", { class: "device-cards", role: "radiogroup", "aria-label": "Device" }, devices.map(card));
  const number = (label) => Number(label.querySelector("input").value);
  const isCount = (label) => Number.isInteger(number(label)) && number(label) >= 1;
  const picked = () => list.querySelector("input:checked")?.value;
  return {
    title: "Devices",
    node: element("div", {}, element("div", { class: "counts" }, nodesLabel, perNodeLabel), list),
    chosen,
    read: () => `${number(nodesLabel)}x${number(perNodeLabel)}x${picked()}`,
    fault: () =>
      !picked()
        ? "Choose a device."
        : isCount(nodesLabel) && isCount(perNodeLabel)
          ? ""
          : "Nodes and devices per node are whole numbers of at least 1.",
  };
}

function written(value, chosen) {
  const text = value == null ? "" : typeof value === "string" ? value : JSON.stringify(value, null, 2);
  const node = element(
    "textarea",
    {
      rows: 4,
      spellcheck: "false",
      "aria-label": "Cluster",
      placeholder: "2x8xh100-sxm-80gb + 2x8xa100-sxm-80gb, or an object as JSON",
    },
    text,
  );
  const isObject = () => node.value.trim().startsWith("{");
  const fault = () => {
    if (!node.value.trim()) return "Write the cluster, such as 4x8xh100-sxm-80gb.";
    return isObject() && !parsed(node.value) ? "This is no JSON object." : "";
  };
  return {
    title: "Written out",
    node,
    chosen,
    read: () => (isObject() ? parsed(node.value) : node.value.trim()),
    fault,
  };
}
