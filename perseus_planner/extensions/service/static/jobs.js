// The list of jobs, and their totals.

import { byId, fillCard, html, keyed, part, say, show } from "./dom.js";
import { budgetText, byPlans, count, isJudged, joules, kilowattHours, less, moment, number, savedShare, seconds, watts } from "./format.js";
import { reportsText } from "./reports.js";

const SEARCHABLE = 8; // fewer need no search

export const addressOf = (name) => `#/jobs/${encodeURIComponent(name)}`;

const ORDER = new Intl.Collator("en", { numeric: true }); // run-9 before run-10
const byName = (one, other) => ORDER.compare(one.job.name, other.job.name);

const slowOf = (status) => Object.keys(status.decision.stragglers).length;

/** Return the jobs whose name contains what is looked for, and say in `place` if there are none. */
function foundJobs(jobs, place) {
  const wanted = byId("filter").value.trim().toLowerCase();
  const found = jobs.filter((status) => status.job.name.toLowerCase().includes(wanted)).sort(byName);
  show(place, found.length === 0);
  say(place, jobs.length ? "No job has that in its name." : "No job runs. Jobs appear here when they register.");
  return found;
}

export function showJobs(jobs, selected) {
  const found = foundJobs(jobs, byId("no-jobs"));
  say(byId("jobs-count"), found.length < jobs.length ? `(${number(found.length)} of ${number(jobs.length)})` : `(${number(jobs.length)})`);
  show(byId("jobs-search"), jobs.length > SEARCHABLE);
  keyed(byId("job-list"), found, (status) => status.job.name, made, (element, status) => fill(element, status, selected));
}

function made(status) {
  return html("li", {}, html("a", { href: addressOf(status.job.name) },
    html("span", { class: "title" }, status.job.name), html("span", { class: "line small", "data-part": "line" })));
}

const COLUMNS = ["GPUs", "Iteration", "Power", "Saved", "Ranks by plan", "State"];

function madeRow(status) {
  const cells = COLUMNS.map((name) => html("td", { class: name === "State" ? null : "number", "data-label": name, "data-part": name }));
  return html("tr", {}, html("th", { scope: "row" }, html("a", { href: addressOf(status.job.name) }, status.job.name)), ...cells);
}

function fillRow(element, status) {
  const { telemetry, expected, gpus } = status;
  const isKnown = isJudged(telemetry) && !status.unlike_plan;
  const texts = [
    gpus ? number(gpus) : "–", seconds(telemetry?.iteration_s ?? status.decision.straggler_time_s), watts(telemetry?.power_w ?? expected.power_w),
    isKnown ? `${kilowattHours(telemetry.saved_j)}, ${savedShare(telemetry)}` : "–",
    telemetry?.ranks ? `${number(telemetry.following)} of ${number(telemetry.ranks)}` : "–", stateOf(status),
  ];
  COLUMNS.forEach((name, index) => say(part(element, name), texts[index]));
  element.classList.toggle("slow", slowOf(status) > 0);
}

/** Say in a few words how a job is. */
export function stateOf(status) {
  const { telemetry, autopilot, promised, version, taken } = status;
  if (status.silent_since_s !== null) return `not heard of since ${moment(status.silent_since_s)}`;
  if (slowOf(status)) return `${reportsText(slowOf(status))}: ${status.decision.reason}`;
  if (status.unlike_plan) return status.unlike_plan;
  if (status.over_budget_since_s !== null) return `over its power budget since ${moment(status.over_budget_since_s)}`;
  if (promised > version) return `planning version ${number(promised)}`;
  if (autopilot !== null && autopilot !== undefined) return `${autopilot.name ?? "autopilot"}: ${autopilot.phase}`;
  if (telemetry === null) return "sends no telemetry";
  if (telemetry.off_plan_since_s !== null) return `${number(telemetry.ranks - telemetry.following)} off their plan`;
  if (status.verdict) return status.verdict;
  return taken === null ? "has taken no plan" : `runs version ${number(taken.version)}`;
}

function fill(element, status, selected) {
  const slow = slowOf(status);
  if (status.job.name === selected) element.firstElementChild.setAttribute("aria-current", "page");
  else element.firstElementChild.removeAttribute("aria-current");
  element.classList.toggle("slow", slow > 0);
  say(part(element, "line"), `${seconds(status.telemetry?.iteration_s ?? status.decision.straggler_time_s)} · ${reportsText(slow)}`);
}

/** Show the totals of all jobs, and the power budget of all of them. */
export function showAll(jobs, budget) {
  const slowJobs = jobs.filter((status) => slowOf(status) > 0);
  const sum = (of) => jobs.reduce((total, status) => total + of(status), 0);
  const now_w = sum((status) => status.telemetry?.power_w ?? status.expected.power_w);
  const most_w = sum((status) => status.expected.baseline_power_w);
  const isUnlike = jobs.some((status) => status.unlike_plan); // what all clocks at maximum would draw is not known then
  const metered = jobs.filter((status) => isJudged(status.telemetry) && !status.unlike_plan).length;
  const kinds = (of) => [...new Set(jobs.map(of).filter(Boolean))].sort().join(" and ");
  const saved_j = sum((status) => (isJudged(status.telemetry) && !status.unlike_plan ? status.telemetry.saved_j : 0));
  const cards = [
    { name: "Jobs", value: number(jobs.length), notes: [slowJobs.length ? `${number(slowJobs.length)} with something slow` : "nothing is slow"] },
    { name: "Saves now, by plans", value: watts(sum((status) => (status.unlike_plan ? 0 : status.expected_saving_w))), origin: kinds((status) => byPlans(status.expected.origin)), notes: ["while pipelines wait for a slower one"] },
  ];
  if (most_w > 0) cards.push({ name: "Power, all GPUs", value: watts(now_w), origin: kinds((status) => (status.telemetry?.power_w == null ? byPlans(status.expected.origin) : status.telemetry.energy_is)), notes: isUnlike ? [] : [`${less(now_w, most_w)} than ${watts(most_w)} with all clocks at maximum`], bar: isUnlike ? null : now_w / most_w });
  if (budget.power_w !== null || budget.schedule.length) {
    const notes = budget.schedule.slice(0, 3).map(budgetText);
    if (budget.schedule.length > 3) notes.push(`and ${number(budget.schedule.length - 3)} more later`);
    cards.push({ name: "Power budget, all jobs", value: budget.power_w === null ? "none" : watts(budget.power_w), notes });
  }
  if (metered) cards.push({ name: "Saved so far", value: kilowattHours(saved_j), origin: kinds((status) => status.telemetry?.energy_is), notes: [joules(saved_j), `from the telemetry of ${count(metered, "job")}`] });
  const found = foundJobs(jobs, byId("all-none"));
  keyed(byId("all-jobs").tBodies[0], found, (status) => status.job.name, madeRow, fillRow);
  show(byId("all-jobs"), found.length > 0);
  keyed(byId("all-cards"), cards, (card) => card.name, () => html("li", { class: "card" }), fillCard);
}
