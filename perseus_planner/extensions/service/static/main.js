// The dashboard: the viewer, the selected job, and regular requests for its status.

import { ask, hasToken, ofJob, Refused, useToken } from "./api.js";
import { Connection, repeat } from "./connection.js";
import { byId, say, show, tick } from "./dom.js";
import { cleared, excuse, showSettings, watchForms } from "./forms.js";
import { span } from "./format.js";
import { addressOf, showAll, showJobs } from "./jobs.js";
import { forgetHistory } from "./history.js";
import { showJob, showView } from "./job.js";
import { forget } from "./pipelines.js";
import { watchPrices } from "./prices.js";

const JOB_MS = 1_000;
const LIST_MS = 10_000;
const ROLES = ["read", "report", "operate"];

const connection = new Connection();
let session = new AbortController(); // ends when the page is hidden or the token changes
let watching = new AbortController(); // ends when another job is selected
let me = null; // {role, name} from the service
let jobs = null;
let together = null; // what they draw and save
let budget = null; // of all jobs: {power_w, schedule}
let selected = null; // name of a job
let seen = null; // its {status, frontier, history, pipelines}
let gone = false;

const may = (role) => ROLES.indexOf(me?.role) >= ROLES.indexOf(role);

// --- The viewer -------------------------------------------------------------------------------------------------------

function begin() {
  session.abort();
  session = new AbortController();
  const { signal } = session;
  repeat(connection, () => askList(signal), LIST_MS, signal).then((refusal) => refusal && askToken(refusal));
  if (me?.role) watch();
}

async function askList(signal) {
  if (me === null) {
    me = await ask("GET", "/v1/me", { signal });
    if (me.role === null) throw new Refused(401, hasToken() ? "This service does not know that token." : "");
    enter();
  }
  [{ jobs, together }, budget] = await Promise.all([ask("GET", "/v1/jobs", { signal }), ask("GET", "/v1/power", { signal })]);
  if (selected === null && jobs.length === 1) location.replace(addressOf(jobs[0].job.name));
  if (gone && jobs.some((status) => status.job.name === selected)) watch();
  draw();
}

function enter() {
  show(byId("sign-in"), false);
  show(byId("layout"), true);
  show(byId("sign-out"), hasToken());
  say(byId("who"), me.name === null ? "" : `${me.name}, role ${me.role}`);
  say(byId("reported-as"), `Reported as ${source()}.`);
  show(byId("report-form"), may("report"));
  show(byId("settings"), may("operate"));
  choose();
}

function askToken(refusal) {
  session.abort();
  watching.abort();
  useToken(null);
  [me, jobs, seen] = [null, null, null];
  connection.heard();
  show(byId("layout"), false);
  show(byId("sign-out"), false);
  show(byId("sign-in"), true);
  say(byId("who"), "");
  say(byId("token-error"), refusal.message);
  byId("token").value = "";
  byId("token").focus();
  document.title = "Planner";
}

const source = () => me.name ?? "dashboard";

// --- The selected job ----------------------------------------------------------------------------------------------------

function choose() {
  const name = /^#\/jobs\/(.+)$/.exec(location.hash)?.[1];
  const wanted = name === undefined ? null : decoded(name);
  if (wanted === selected && seen !== null) return;
  [selected, seen] = [wanted, null];
  forget();
  forgetHistory();
  for (const line of document.querySelectorAll("#job .response, #reports-response")) say(line, "");
  watch();
  draw();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand; no job has this name
  }
}

function watch() {
  watching.abort();
  watching = new AbortController();
  gone = false;
  const signal = AbortSignal.any([session.signal, watching.signal]);
  if (selected === null || signal.aborted) return;
  const name = selected;
  repeat(connection, () => askJob(name, signal), JOB_MS, signal).then((refusal) => refusal && lost(refusal));
}

async function askJob(name, signal) {
  const status = await ask("GET", ofJob(name), { signal });
  const known = seen?.status.job.frontier === status.job.frontier ? seen.frontier : null;
  const [frontier, history, pipelines] = await Promise.all([
    known ?? ask("GET", ofJob(name, "frontier"), { signal }),
    ask("GET", ofJob(name, "history"), { signal }),
    isAsBefore(status) ? seen.pipelines : ask("GET", ofJob(name, "pipelines"), { signal }).then((answer) => answer.pipelines),
  ]);
  const first = seen === null;
  seen = { status, frontier, history, pipelines };
  draw();
  if (first && document.activeElement?.closest("#job-list")) byId("job-title").focus();
}

const isAsBefore = (status) => seen !== null && seen.status.version === status.version && JSON.stringify(seen.status.decision) === JSON.stringify(status.decision);

function lost(refusal) {
  if (refusal.status === 401) {
    askToken(refusal);
    return;
  }
  [gone, seen] = [true, null];
  watching.abort();
  draw();
}

// --- Drawing ---------------------------------------------------------------------------------------------------

function draw() {
  byId("layout").classList.toggle("one", selected !== null);
  if (jobs !== null) showJobs(jobs, selected);
  if (selected === null) {
    document.title = "Planner";
    if (jobs !== null) showAll(jobs, together, budget);
    showView(jobs === null ? null : "all");
  } else if (gone) {
    say(byId("gone-name"), selected);
    showView("gone");
  } else if (seen !== null) {
    showJob(seen, may("report"), clear);
    showSettings(seen.status.job);
    showView("job");
  } else showView(null);
}

async function clear(report, button) {
  const line = byId("reports-response");
  button.disabled = true;
  try {
    say(line, await cleared(selected, report));
    line.classList.remove("bad");
    byId("reports-title").focus(); // the button disappears with its report
    connection.nudge();
  } catch (error) {
    line.classList.add("bad");
    say(line, excuse(error));
    button.disabled = false;
    button.focus();
  }
}

function showStanding() {
  const { away, heardMs } = connection;
  const age = heardMs === null ? null : span((Date.now() - heardMs) / 1000);
  document.body.classList.toggle("is-away", away !== null);
  show(byId("away"), away !== null);
  if (away !== null) say(byId("away-why"), `(${away.message})`);
  say(byId("away-age"), age === null ? "No data yet." : `The data shown is ${age} old.`);
  say(byId("standing-text"), away !== null ? "Cannot be reached; trying again" : heardMs === null ? "Connecting…" : "Live");
  say(byId("age"), age === null ? "" : `updated ${age} ago`);
}

// --- Begin -----------------------------------------------------------------------------------------------------------

connection.addEventListener("change", showStanding);
setInterval(() => {
  showStanding();
  tick();
}, 1000);
addEventListener("hashchange", choose);
addEventListener("online", () => connection.nudge());
document.addEventListener("visibilitychange", () => (document.hidden ? session.abort() : begin())); // a hidden page sends no requests
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would not be that of a job
  byId("main").focus();
});
byId("try-now").addEventListener("click", () => connection.nudge());
byId("filter").addEventListener("input", () => {
  showJobs(jobs, selected);
  showAll(jobs, together, budget);
});
byId("sign-out").addEventListener("click", () => askToken(new Refused(401, "")));
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value.trim());
  begin();
});
watchForms(() => ({ job: selected, source: source(), asked: () => connection.nudge() }));
watchPrices(draw);
begin();
