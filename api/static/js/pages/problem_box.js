/** Errors as a box: what happened, and what to do. */

import { Problem } from "shardplan/api.js";
import { element } from "shardplan/dom.js";

/**
 * Returns the box of an error: a `Problem`, its data, or an error of the page itself.
 * @param {Problem|Error|{title: string, detail?: string, what_to_do?: string}} error
 * @param {...Node} actions
 */
export function problemBox(error, ...actions) {
  const { title, detail, what_to_do: advice } = dataOf(error);
  return element(
    "section",
    { class: "problem", role: "alert" },
    element("h2", {}, title),
    detail ? element("p", {}, detail) : null,
    advice ? element("p", {}, element("strong", {}, "What to do: "), advice) : null,
    actions.length ? element("p", { class: "actions" }, actions) : null,
  );
}

function dataOf(error) {
  if (error instanceof Problem) return error.data;
  if (error instanceof Error) return { title: "This page met an error of its own", detail: String(error.message) };
  return error;
}
