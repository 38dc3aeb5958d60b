// The forms of the page: reporting and clearing stragglers, deadline and power budget.

import { ask, Away, ofJob, Refused } from "./api.js";
import { byId, say, show } from "./dom.js";
import { seconds, spanOf, watts } from "./format.js";
import { scopeText } from "./reports.js";

const NUMBERED = ["pipeline", "stage", "rank"];
const NAMES = { pipeline: "Its number", stage: "Its number", rank: "Its number", gpu: "Its UUID", node: "Its name" };
const LEAST = { slowdown: "1", score: "0.000001", iteration_s: "0" };

let unanswered = { content: "", key: "" }; // a report whose answer was lost is sent again with the same key, so that it counts once

/** Handle the forms. now() returns {job: its name, source: who reports, asked: called after a request}. */
export function watchForms(now) {
  byId("report-form").addEventListener("submit", (event) => submitted(event, (form) => report(form, now())));
  byId("report-form").addEventListener("input", fit);
  for (const [id, name, field] of [["deadline-form", "deadline", "deadline_s"], ["power-form", "power", "power_w"]]) {
    const send = (value) => set(now(), name, { [field]: value });
    byId(id).addEventListener("submit", (event) => submitted(event, () => send(byId(name).valueAsNumber)));
    byId(id).querySelector(".remove").addEventListener("click", () => respond(byId(id), () => send(null)));
  }
  fit();
}

/** Withdraw a report, and return a message about it. */
export async function cleared(job, report) {
  const answer = await ask("DELETE", ofJob(job, "reports", report.key));
  return `Cleared ${scopeText(report)}: ${effect(answer)}`;
}

/** Explain to people why a request failed. */
export function excuse(error) {
  if (error instanceof Away) return `The service cannot be reached: ${error.message}. The request may not have been carried out; try again.`;
  if (error instanceof Refused || error instanceof TypeError) return `Refused: ${error.message}.`;
  throw error;
}

function submitted(event, task) {
  event.preventDefault();
  respond(event.target, () => task(event.target));
}

async function respond(form, task) {
  const line = form.querySelector(".response");
  line.classList.remove("bad");
  say(line, "Sending…");
  try {
    say(line, await task());
  } catch (error) {
    line.classList.add("bad");
    say(line, excuse(error));
  }
}

async function report(form, { job, source, asked }) {
  const fields = new FormData(form);
  const [kind, value] = [fields.get("kind"), fields.get("value").trim()];
  const inPipeline = kind === "pipeline" ? "" : fields.get("pipeline").trim();
  if (NUMBERED.includes(kind) && !/^\d{1,9}$/.test(value)) throw new TypeError(`${value} is not a ${kind}; write 0 for the first one, 1 for the next`);
  const content = {
    source,
    scope: { kind, value: NUMBERED.includes(kind) ? Number(value) : value, pipeline: inPipeline === "" ? null : Number(inPipeline) },
    [fields.get("slowness")]: Number(fields.get("amount")),
    in_s: spanOf(fields.get("in")),
    ttl_s: spanOf(fields.get("ttl")),
    cause: fields.get("cause"),
  };
  const answer = await ask("POST", ofJob(job, "reports"), { body: { ...content, key: keyOf(JSON.stringify([job, content])) } });
  unanswered = { content: "", key: "" };
  for (const id of ["scope-value", "scope-pipeline", "amount", "begins", "ttl"]) byId(id).value = "";
  asked();
  return `Reported: ${effect(answer)}`;
}

async function set({ job, asked }, name, body) {
  const answer = await ask("PUT", ofJob(job, name), { body });
  asked();
  return `Set: ${effect(answer.answers?.[0] ?? answer)}`;
}

const EFFECTS = { planning: "is being planned", "next iteration": "is ready for the job's next iteration", already: "is what the job runs" };

function effect({ reason, version, takes_effect, expected_saving_w }) {
  const saving = expected_saving_w === null ? "the saving is not known yet" : `extra beside stragglers: ${watts(expected_saving_w)}`;
  return `${reason}. Version ${version} ${EFFECTS[takes_effect] ?? takes_effect}; ${saving}.`;
}

function keyOf(content) {
  if (unanswered.content !== content) {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    unanswered = { content, key: `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}` };
  }
  return unanswered.key;
}

/** Adapt the fields to the selection. */
function fit() {
  const [kind, slowness] = [byId("scope-kind").value, byId("slowness").value];
  say(byId("scope-value-label"), NAMES[kind]);
  byId("scope-value").inputMode = NUMBERED.includes(kind) ? "numeric" : "text";
  show(byId("scope-pipeline-field"), kind !== "pipeline");
  byId("amount").min = LEAST[slowness];
  byId("amount").max = slowness === "score" ? "1" : "";
}

/** Show the current settings as placeholders. */
export function showSettings(job) {
  byId("deadline").placeholder = job.deadline_s === null ? "all clocks at maximum" : seconds(job.deadline_s);
  byId("power").placeholder = job.power_w === null ? "unlimited" : watts(job.power_w);
}
