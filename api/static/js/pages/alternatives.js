/** A field that can be given in several ways, one of which is chosen. */

import { element } from "shardplan/dom.js";

/**
 * Returns the field; its members are those of field.js.
 * @param {string} name of the field in the request
 * @param {string} label
 * @param {Array<{title: string, node: Node, chosen: boolean, read: function(): *, fault: function(): string}>} ways
 */
export function alternatives(name, label, ways) {
  const error = element("span", { class: "error", id: `${name}-error` });
  const radios = ways.map((way, index) =>
    element("input", { type: "radio", name: `${name}-way`, value: index, checked: way.chosen, on: { change: show } }),
  );
  const chosen = () => radios.findIndex((radio) => radio.checked);

  function show() {
    ways.forEach((way, index) => {
      way.node.hidden = index !== chosen();
    });
    error.textContent = "";
  }

  show();
  const choices = element(
    "div",
    { class: "ways" },
    ways.map((way, index) => element("label", {}, radios[index], ` ${way.title}`)),
  );
  return {
    name,
    node: element(
      "fieldset",
      { class: "field alternatives", "aria-describedby": error.id },
      element("legend", {}, label),
      choices,
      ways.map((way) => way.node),
      error,
    ),
    read: () => ways[chosen()].read(),
    fault: () => ways[chosen()].fault(),
    mark: (text) => {
      error.textContent = text;
    },
    focus: () => radios[chosen()].focus(),
  };
}
