// One job: what it does now, why, and what that saves.

import { byId, fillCard, html, keyed, say, show, timed } from "./dom.js";
import { budgetText, byPlans, count, isJudged, joules, kilowattHours, less, number, profileText, savedShare, seconds, watts } from "./format.js";
import { isCalm, stateText } from "./jobs.js";
import { groups, showPipelines } from "./pipelines.js";
import { assumed, carbon, money, withPue } from "./prices.js";
import { showHistory } from "./history.js";
import { showReports } from "./reports.js";

const DAY_S = 86_400;

/** Show a job from the service's answers: {status, frontier, pipelines, history}. */
export function showJob({ status, frontier, pipelines, history }, mayReport, clear) {
  const { job, decision } = status;
  say(byId("job-title"), job.name);
  byId("job-about").replaceChildren(about(job, frontier), "; registered ", timed(job.since_s));
  byId("state").classList.toggle("slow", !isCalm(status));
  byId("state").classList.toggle("unknown", status.state.name === "not known");
  say(byId("state-text"), sentence(stateText(status)));
  say(byId("reason"), sentence(decision.reason));
  show(byId("reason"), !status.state.text.includes(decision.reason)); // beside a straggler, the state is what was decided
  byId("reason-since").replaceChildren("Since ", timed(decision.since_s), ...lookAgain(decision));
  keyed(byId("cards"), cards(status, frontier), (card) => card.name, () => html("li", { class: "card" }), fillCard);
  byId("origin").replaceChildren(...originOf(status, frontier));
  showPipelines(status, frontier, groups(pipelines));
  showAutopilot(status.autopilot ?? null);
  showHistory(history, job);
  showReports(status, mayReport, clear);
  document.title = `${isCalm(status) ? "" : `${sentence(status.state.name).slice(0, -1)} · `}${job.name} · Planner`;
}

function about(job, frontier) {
  return `${count(job.pipelines, "pipeline")}, ${count(frontier.stages, "stage")} and ${count(frontier.gpus, "GPU")} each${job.ranks ? `; ${count(job.ranks, "rank")} known` : ""}`;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

const lookAgain = (decision) => (decision.look_again_s === null ? ["."] : ["; next change by time alone ", timed(decision.look_again_s), "."]);

function cards(status, frontier) {
  return [iteration(status, frontier), power(status), saved(status), costs(status), plans(status), changes(status)];
}

const UNHEARD = "not known, as it is not heard of";

function iteration({ job, decision, telemetry, silent_since_s }, frontier) {
  const ofPlans = byPlans(frontier.origin);
  const target_s = job.deadline_s ?? frontier.baseline_time_s;
  const of = job.deadline_s === null ? "all clocks at maximum" : "as set";
  const notes = [`wanted without stragglers: ${seconds(target_s)}, ${of}`];
  if (telemetry) notes.push(`expected ${seconds(decision.straggler_time_s)}, ${ofPlans}`);
  if (silent_since_s !== null) return { name: "Iteration time", value: "–", notes: [UNHEARD, ...notes] };
  return { name: "Iteration time", value: seconds(telemetry?.iteration_s ?? decision.straggler_time_s), origin: telemetry ? "measured" : ofPlans, notes };
}

function power({ job, decision, telemetry, expected, saves_w, expected_saving_w: extra_w, silent_since_s }) {
  if (silent_since_s !== null) return { name: "Power, all GPUs", value: "–", notes: [UNHEARD, ...(job.next_power ? [budgetText(job.next_power)] : [])] };
  const sent_w = telemetry?.power_w ?? null;
  const now_w = sent_w ?? expected.power_w;
  const most_w = now_w + (saves_w ?? 0); // in iterations as long as those that ran
  const saving = `${less(now_w, most_w)} than ${watts(most_w)} with all clocks at maximum, ${byPlans(expected.origin)}`;
  const notes = saves_w === null ? [] : [`saves ${watts(saves_w)}`, saving.replace("the same than", "the same as")];
  if (job.power_w !== null) notes.push(sent_w > job.power_w ? `${watts(sent_w - job.power_w)} over its budget of ${watts(job.power_w)}` : `at most ${watts(job.power_w)} allowed`);
  if (job.next_power) notes.push(budgetText(job.next_power));
  if (Object.keys(decision.stragglers).length) notes.push(`extra beside stragglers: ${watts(extra_w)}, by the bound of its frontier, ${byPlans(expected.origin)}`);
  return { name: "Power, all GPUs", value: watts(now_w), origin: sent_w === null ? byPlans(expected.origin) : telemetry.energy_is, notes, bar: saves_w === null ? null : now_w / most_w };
}

/** Whether the job has sent the energy of its GPUs. */
const isMetered = ({ telemetry }) => telemetry !== null && telemetry.energy_is !== null;

/** Joules that the plans save in a day of continuous training. */
const expectedDayJ = ({ expected }) => (expected.baseline_power_w - expected.power_w) * DAY_S;

function saved(status) {
  const { telemetry } = status;
  if (status.unlike_plan) return { name: "Saved", value: "–", notes: [status.unlike_plan] };
  if (isMetered(status) && !isJudged(telemetry)) return { name: "Saved", value: "–", notes: ["not known: most iterations ran otherwise than the rows of their plan say"] };
  if (isMetered(status)) {
    const how = telemetry.lowered ? `${joules(telemetry.saved_j)}, ${savedShare(telemetry)} less than all clocks at maximum` : "no clock was lowered, nothing was saved";
    const notes = [`${how}, at the GPUs`, `in ${count(telemetry.iterations, "iteration")}`];
    return { name: "Saved so far", value: kilowattHours(telemetry.saved_j), origin: telemetry.energy_is, notes };
  }
  if (status.silent_since_s !== null) return { name: "Saved", value: "–", notes: [UNHEARD] };
  const day_j = expectedDayJ(status);
  return { name: "Saves per day, by its plans", value: kilowattHours(day_j), origin: byPlans(status.expected.origin), notes: [`${joules(day_j)} at the GPUs by continuous training with these plans, compared with all clocks at maximum`, "the job has not sent its energy yet"] };
}

function costs(status) {
  const { telemetry } = status;
  if (status.unlike_plan) return { name: "Cost saved", value: "–", notes: [] };
  const isMeasured = isMetered(status);
  if (!isMeasured && status.silent_since_s !== null) return { name: "Cost saved", value: "–", notes: [] };
  if (isMeasured && !isJudged(telemetry)) return { name: "Cost saved", value: "–", notes: [] };
  const saved_j = isMeasured ? telemetry.saved_j : expectedDayJ(status);
  const name = isMeasured ? "Cost saved so far" : "Cost saved per day";
  return { name, value: money(saved_j), origin: isMeasured ? telemetry.energy_is : byPlans(status.expected.origin), notes: [withPue(saved_j), carbon(saved_j), assumed()] };
}

function plans({ version, promised, taken }) {
  const notes = promised > version ? [`version ${number(promised)} is being planned`] : [];
  if (taken === null) notes.push("the job has not reported what it runs");
  else notes.push([`the job runs ${number(taken.version)} since iteration ${number(taken.iteration)}, `, timed(taken.at_s)]);
  return { name: "Version of its plans", value: number(version), notes };
}

function changes({ telemetry }) {
  if (!telemetry || telemetry.set_p50_s === null) return { name: "A clock change takes", value: "–", notes: ["the job has not sent this yet"] };
  const notes = [`99\u00a0% within ${seconds(telemetry.set_p99_s)}`, `${count(telemetry.changes_late, "change")} came late`];
  // An emulated GPU has the clocks of a model, and so has its energy.
  const origin = telemetry.energy_is === "simulated" ? "simulated" : "measured";
  return { name: "A clock change takes", value: seconds(telemetry.set_p50_s), origin, notes: ["median", ...notes] };
}

/** The origin of the figures, and how recent those of the job are, as it may have stopped sending them. */
function originOf({ telemetry }, frontier) {
  const ofPlans = frontier.origin === "simulated" ? "Figures of plans are replayed from a simulated profile." : `Figures of plans are replayed from a ${profileText(frontier.origin)}, not measured on this job.`;
  if (telemetry === null) return [`This job sends no telemetry, so nothing here is measured on it. ${ofPlans}`];
  const simulated = telemetry.energy_is === "simulated" ? "Simulated: the energy is that of a model of the GPU. " : "";
  return ["The job last sent telemetry ", timed(telemetry.observed_s), `. ${simulated}${ofPlans}`];
}

/** What the autopilot of a training without a plan knows, and what it owes. */
function showAutopilot(autopilot) {
  show(byId("autopilot"), autopilot !== null);
  if (autopilot === null) return;
  const { phase, iteration, reference_s, columns } = autopilot;
  const { saving = null, saving_stderr = null, owed_s = 0, burst_s = 0, trials, unknown } = columns;
  const error = saving_stderr === null ? "" : ` ± ${number(100 * saving_stderr, 1)}`;
  const saved = saving === null ? "not known yet" : `${number(100 * saving, 1)}${error}\u00a0% of the energy at full clocks`;
  say(byId("autopilot-phase"), `This job learns while it trains, without a plan. Phase: ${phase}.`);
  const facts = [
    ["Planned saving", saved], ["Iteration at full clocks", reference_s === null ? "not known yet" : seconds(reference_s)],
    [owed_s < 0 ? "Ledger: time to spare" : "Ledger: time owed", `${seconds(Math.abs(owed_s))}; it may owe ${seconds(burst_s)}`],
    ["Operating points tried", `${number(trials)} in iteration ${number(iteration)}`], ["Not known yet", number(unknown)],
  ];
  byId("autopilot-facts").replaceChildren(...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
}

/** Show one of the views "all", "gone" and "job"; none of them for null. */
export function showView(name) {
  for (const each of ["all", "gone", "job"]) show(byId(each), each === name);
}
