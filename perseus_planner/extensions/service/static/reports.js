// The reports of a job that count now or will count.

import { byId, html, keyed, part, say, show, timed } from "./dom.js";
import { number, seconds } from "./format.js";

const KINDS = { pipeline: "Pipeline", stage: "Stage", rank: "Rank", gpu: "GPU", node: "Node" };

export const scopeText = ({ scope }) => `${KINDS[scope.kind]} ${scope.value}${scope.pipeline === null ? "" : ` of pipeline ${scope.pipeline}`}`;

export function slownessText({ slowdown, iteration_s }) {
  if (slowdown === null) return `iterations of ${seconds(iteration_s)}`;
  return slowdown === 1 ? "recovered" : `slowdown ${number(slowdown)}`;
}

/** Show the reports of a job. If `mayClear`, each has a button that calls `clear(report)`. */
export function showReports(status, mayClear, clear) {
  say(byId("reports-count"), status.reports.length ? `(${status.reports.length})` : "");
  show(byId("no-reports"), status.reports.length === 0);
  const counting = new Set(Object.values(status.decision.stragglers));
  keyed(byId("reports"), status.reports, (report) => report.key, (report) => made(report, clear), (element, report) => {
    part(element, "state").replaceChildren(...state(report, counting));
    show(part(element, "clear"), mayClear);
  });
}

function made(report, clear) {
  const button = html("button", { type: "button", "data-part": "clear", "aria-label": `Clear: ${scopeText(report)}, ${slownessText(report)}, reported by ${report.source}` }, "Clear");
  button.addEventListener("click", () => clear(report, button));
  const facts = [["Source", report.source], ["Cause", report.cause], ["Since", begin(report)], ["Until", report.expires_s === null ? "cleared" : timed(report.expires_s)]];
  return html("li", {},
    html("div", {}, html("p", { class: "what" }, html("strong", {}, scopeText(report)), ` ${slownessText(report)} `, html("span", { class: "soft small", "data-part": "state" })),
      html("dl", { class: "facts" }, ...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)))),
      html("details", {}, html("summary", {}, "Key, for programs"), html("code", {}, report.key))),
    button);
}

const begin = (report) => (report.begins_iteration === null ? timed(report.begins_s) : `iteration ${number(report.begins_iteration)}`);

function state(report, counting) {
  if (counting.has(report.key)) return ["· counts"];
  if (report.begins_iteration === null && report.begins_s * 1000 > Date.now()) return ["· begins ", timed(report.begins_s)];
  return ["· does not count"];
}
