/** The dialog that asks for an API token. */

import { storedToken, storeToken } from "shardplan/api.js";
import { element } from "shardplan/dom.js";

/**
 * Returns the dialog, the button that opens it, and `ask`, which opens it and tells whether a token was given. Calls
 * that ask at the same time get the same answer.
 */
export function tokenDialog() {
  let asked = null;
  const input = element("input", { type: "password", name: "token", autocomplete: "off", placeholder: "sp_..." });
  const why = element("p", {});
  const close = (given) => (event) => {
    event.preventDefault();
    if (given) storeToken(input.value.trim());
    dialog.close(given ? "given" : "");
  };
  const dialog = element(
    "dialog",
    { "aria-label": "API token" },
    element(
      "form",
      { on: { submit: close(true) } },
      element("h2", {}, "API token"),
      why,
      element("label", {}, "Token ", input),
      element("p", { class: "quiet" }, "It is kept in this tab until the tab is closed."),
      element(
        "p",
        { class: "actions" },
        element("button", { type: "submit", class: "primary" }, "Use it"),
        element("button", { type: "button", on: { click: close(false) } }, "Cancel"),
      ),
    ),
  );

  function ask(reason = "This server answers only to those who have a token.") {
    asked ??= new Promise((resolve) => {
      why.textContent = reason;
      input.value = storedToken();
      dialog.returnValue = "";
      dialog.addEventListener(
        "close",
        () => {
          asked = null;
          resolve(dialog.returnValue === "given");
        },
        { once: true },
      );
      dialog.showModal();
    });
    return asked;
  }

  const change = async () => {
    if (await ask("Requests of this tab are sent with this token; leave it empty to send none.")) location.reload();
  };
  return {
    dialog,
    ask: () => ask(),
    button: element("button", { type: "button", class: "quiet", on: { click: change } }, "Token"),
  };
}
