/** The price of a device, in US dollars per hour, which this browser stores; and what a step costs at it. */

import { element } from "shardplan/dom.js";
import { dollars } from "shardplan/format.js";
import { storedText, storeText } from "shardplan/storage.js";

const KEY = "shardplan-price";

/**
 * Returns a label with the input element of the price.
 * @param {function(?number)} use called at once, and whenever the price changes; null: there is none
 */
export function priceInput(use) {
  const input = element("input", {
    type: "text",
    inputmode: "decimal",
    size: 6,
    autocomplete: "off",
    value: storedText(KEY) ?? "",
    on: { input: changed },
  });

  function changed() {
    storeText(KEY, input.value);
    tell();
  }

  function tell() {
    use(Number(input.value) > 0 ? Number(input.value) : null);
  }

  tell();
  return element("label", { class: "inline" }, "Price of a device, $ per hour ", input);
}

/** Returns what `seconds` of `devices` cost at a price per hour; null where one of them is not known. */
export function priceOf(seconds, devices, perHour) {
  return perHour && seconds && devices ? (seconds * devices * perHour) / 3600 : null;
}

/** Returns the line of a plan's head that says what a step costs. */
export function priceOfStep(seconds, devices) {
  const text = element("output", {});
  const label = priceInput((perHour) => {
    const price = priceOf(seconds, devices, perHour);
    text.textContent = price == null ? "" : `a step costs ${dollars(price)}`;
    if (price == null) delete text.dataset.value;
    else text.dataset.value = price;
  });
  return element("p", { class: "price no-print" }, label, text);
}
