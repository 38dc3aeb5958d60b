// The list of jobs, and their totals.

import { byId, fillCard, html, keyed, part, say, show } from "./dom.js";
import { budgetText, byPlans, count, isJudged, joules, kilowattHours, less, moment, number, savedShare, seconds, watts } from "./format.js";

const SEARCHABLE = 8; // fewer need no search

export const addressOf = (name) => `#/jobs/${encodeURIComponent(name)}`;

const ORDER = new Intl.Collator("en", { numeric: true }); // run-9 before run-10
const byName = (one, other) => ORDER.compare(one.job.name, other.job.name);

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

const COLUMNS = ["GPUs", "Target", "Iteration", "Power", "Saved", "Ranks by plan", "State"];

function madeRow(status) {
  const cells = COLUMNS.map((name) => html("td", { class: name === "State" ? null : "number", "data-label": name, "data-part": name }));
  return html("tr", {}, html("th", { scope: "row" }, html("a", { href: addressOf(status.job.name) }, status.job.name)), ...cells);
}

function fillRow(element, status) {
  const { telemetry, expected, gpus } = status;
  const isKnown = isJudged(telemetry) && !status.unlike_plan;
  const texts = [
    gpus ? number(gpus) : "–", seconds(status.decision.straggler_time_s), nowText(status),
    status.silent_since_s === null ? watts(telemetry?.power_w ?? expected.power_w) : "–",
    isKnown ? `${kilowattHours(telemetry.saved_j)}, ${savedShare(telemetry)}` : "–",
    telemetry?.ranks ? `${number(telemetry.following)} of ${number(telemetry.ranks)}` : "–", stateText(status),
  ];
  COLUMNS.forEach((name, index) => say(part(element, name), texts[index]));
  element.classList.toggle("slow", !isCalm(status));
}

/** The time of an iteration as it was measured of late; a dash if it is not known. */
const nowText = ({ telemetry, silent_since_s }) => (telemetry === null || silent_since_s !== null ? "–" : seconds(telemetry.iteration_s));

/** The state of a job in words, as the service says it. */
export function stateText({ state }) {
  const since = state.since_s === null ? "" : ` since ${moment(state.since_s)}`;
  return `${state.name}${since}: ${state.text}`;
}

/** Whether nothing about a job needs an operator. */
export const isCalm = ({ state }) => state.name === "fine" || state.name === "not known";

function fill(element, status, selected) {
  if (status.job.name === selected) element.firstElementChild.setAttribute("aria-current", "page");
  else element.firstElementChild.removeAttribute("aria-current");
  element.classList.toggle("slow", !isCalm(status));
  say(part(element, "line"), `${nowText(status)} · ${status.state.name}`);
}

/** How many jobs have each state, the most frequent first, such as "3 fine, 1 late". */
function statesText(jobs) {
  const amounts = new Map();
  for (const { state } of jobs) amounts.set(state.name, (amounts.get(state.name) ?? 0) + 1);
  return [...amounts].sort((one, other) => other[1] - one[1]).map(([name, amount]) => `${number(amount)} ${name}`).join(", ");
}

/** The cards of what jobs draw and save together, which the service has added up. */
function togetherCards(jobs, together) {
  const { heard_of: heardOf, measured, silent, power_w: now_w, saves_w, compared, extra_w } = together;
  const kinds = (of) => [...new Set(jobs.filter((status) => status.silent_since_s === null).map(of).filter(Boolean))].sort().join(" and ");
  const origin = kinds((status) => (status.telemetry?.power_w == null ? byPlans(status.expected.origin) : status.telemetry.energy_is));
  const whose = measured < heardOf ? [`${count(heardOf - measured, "job")} by plans, without telemetry`] : [];
  const left = silent ? [`without ${count(silent, "job")} not heard of`] : [];
  const most_w = now_w + saves_w;
  const isKnown = compared === heardOf && most_w > 0;
  const than = isKnown ? [`${less(now_w, most_w)} than ${watts(most_w)} with all clocks at maximum`.replace("the same than", "the same as")] : [];
  const of = compared < heardOf ? [`of ${count(compared, "job")}; not known of the others`] : [];
  return [
    { name: "Power, all GPUs", value: watts(now_w), origin, notes: [...than, ...whose, ...left], bar: isKnown ? now_w / most_w : null },
    { name: "Saves now", value: watts(saves_w), origin, notes: ["against all clocks at maximum", ...of, ...left] },
    { name: "Extra beside stragglers", value: watts(extra_w), origin: kinds((status) => byPlans(status.expected.origin)), notes: ["while pipelines wait for a slower one, beyond their own plans"] },
  ];
}

/** Show the totals of all jobs, and the power budget of all of them. */
export function showAll(jobs, together, budget) {
  const sum = (of) => jobs.reduce((total, status) => total + of(status), 0);
  const metered = jobs.filter((status) => isJudged(status.telemetry) && !status.unlike_plan).length;
  const kinds = (of) => [...new Set(jobs.map(of).filter(Boolean))].sort().join(" and ");
  const saved_j = sum((status) => (isJudged(status.telemetry) && !status.unlike_plan ? status.telemetry.saved_j : 0));
  const cards = [{ name: "Jobs", value: number(jobs.length), notes: [statesText(jobs)].filter(Boolean) }];
  if (together.heard_of) cards.push(...togetherCards(jobs, together));
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
