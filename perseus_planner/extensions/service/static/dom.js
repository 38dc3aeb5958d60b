// Helpers for elements. Everything from the service is inserted as text, never as HTML.

import { nowS } from "./api.js";
import { moment, span } from "./format.js";

export const { html, svg } = charts;

export const byId = (id) => document.getElementById(id);

/** Set the text of an element if it differs, so that screen readers do not repeat it. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/** Make the children of `parent` match `items`. Elements whose key remains keep their focus.
 *
 * make(item) returns an element; fill(element, item) updates it.
 */
export function keyed(parent, items, key, make, fill) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = before.get(name);
    before.delete(name);
    if (element === undefined) {
      element = make(item);
      element.dataset.key = name;
    }
    fill(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const element of before.values()) element.remove();
}

/** The element in `parent` with that `data-part`. */
export const part = (parent, name) => parent.querySelector(`[data-part="${name}"]`);

/** Fill a card: a name, a figure with its unit, its origin, and notes. */
export function fillCard(element, { name, value, origin = null, notes = [], bar = null }) {
  if (element.childElementCount === 0) {
    element.append(
      html("p", { class: "name" }, html("span", { "data-part": "name" }), " ", html("span", { class: "origin", "data-part": "origin" })),
      html("p", { class: "value" }, html("span", { "data-part": "figure" }), " ", html("span", { class: "unit", "data-part": "unit" })),
      svg("svg", { class: "meter", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true", "data-part": "meter" },
        svg("rect", { class: "all", width: 100, height: 4 }), svg("rect", { class: "now", height: 4, "data-part": "now" })),
      html("div", { class: "notes", "data-part": "notes" }),
    );
  }
  const [figure, ...unit] = value.split("\u00a0");
  say(part(element, "name"), name);
  say(part(element, "origin"), origin ?? "");
  show(part(element, "origin"), origin !== null);
  say(part(element, "figure"), figure);
  say(part(element, "unit"), unit.join("\u00a0"));
  part(element, "meter").classList.toggle("none", bar === null);
  if (bar !== null) part(element, "now").setAttribute("width", String(Math.min(100, Math.max(0, 100 * bar))));
  keyed(part(element, "notes"), notes, (note) => notes.indexOf(note), () => html("p", { class: "note" }), (line, note) => {
    if (typeof note === "string") say(line, note);
    else line.replaceChildren(...note);
  });
}

/** An element that shows a moment as the time from now; `tick` updates it. */
export function timed(at_s) {
  const element = html("time", { datetime: new Date(at_s * 1000).toISOString(), title: moment(at_s), "data-at": at_s });
  say(element, distance(at_s));
  return element;
}

export function tick() {
  for (const element of document.querySelectorAll("time[data-at]")) say(element, distance(Number(element.dataset.at)));
}

function distance(at_s) {
  const ahead_s = at_s - nowS();
  return ahead_s > 0 ? `in ${span(ahead_s)}` : `${span(-ahead_s)} ago`;
}
