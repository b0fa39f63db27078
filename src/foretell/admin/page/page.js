// The page's timer: polls while the page is visible, shows the answers, and reports when none comes.

import { get, token } from "./api.js";
import { byId, clock, name, say } from "./dom.js";
import * as sections from "./sections.js";
import * as sessions from "./sessions.js";
import * as switches from "./switches.js";

const EVERY_MS = 2000;
const SPAN_SECONDS = 905;
/** Replicas are polled at every second look, policies and coverage at every fifth. */
const LOOKS = { replicas: 2, policies: 5, coverage: 5 };

const state = { look: 0, started: null, samples: [], listed: -1, replicas: null, policies: null, coverage: null, heard: null, span: "lately" };
let timer = null;
let asking = false;
let again = false;

/** Requests what may have changed and shows it. `whole`: requests everything. */
async function look(whole) {
  const last = state.samples.at(-1)?.number ?? 0;
  let status = await get(`/api/status?after=${last}`);
  if (status.started !== state.started) {
    // Another process answers: the samples of the last one are dropped.
    if (state.started !== null && last > 0) status = await get("/api/status?after=0");
    Object.assign(state, { started: status.started, samples: [], listed: -1 });
    whole = true;
  }
  const seen = state.samples.at(-1)?.number ?? 0;
  const fresh = status.samples.filter((sample) => sample.number > seen);
  state.samples = [...state.samples, ...fresh].filter((sample) => sample.at > status.now - SPAN_SECONDS);
  const due = (every) => whole || state.look % every === 0;
  const wants = [
    due(LOOKS.replicas) ? get("/api/replicas") : null,
    due(LOOKS.policies) ? get("/api/policies").catch(none) : null,
    status.sessions !== state.listed ? get("/api/sessions?rounds=no") : null,
    due(LOOKS.coverage) ? get("/api/coverage") : null,
  ];
  const [replicas, policies, list, coverage] = await Promise.all(wants);
  state.look += 1;
  state.replicas = replicas?.replicas ?? state.replicas;
  state.policies = policies ?? state.policies;
  state.coverage = coverage ?? state.coverage;
  show(status);
  if (list === null) sessions.tick(status.now);
  else sessions.take(list.sessions, status.now);
  state.listed = status.sessions;
}

/** The policies of a process without a configuration. */
function none(error) {
  if (error.status !== 404) throw error;
  return { policies: [], refused: [], synchronized: true };
}

function show(status) {
  state.status = status;
  sections.top(status);
  sections.helping(status, state.span);
  sections.wrong(status, state.replicas, state.policies);
  sections.overTime(status, state.samples);
  sections.why(status, state.span);
  sections.coverage(state.coverage);
  sections.drafts(status, state.span);
  sections.replicas(state.replicas, status.now);
  sections.policies(state.policies);
  switches.show(status);
  // A link carries no token.
  name(byId("links"), "hidden", token.given() ? "" : null);
}

async function refresh(whole) {
  if (asking) {
    again = true;
    return;
  }
  clearTimeout(timer);
  asking = true;
  try {
    await look(whole);
    state.heard = Date.now();
    stale(null);
  } catch (error) {
    failed(error);
  }
  asking = false;
  if (again) {
    again = false;
    refresh(true);
  } else if (!document.hidden && !byId("token").open) {
    timer = setTimeout(refresh, EVERY_MS, false);
  }
}

function failed(error) {
  if (error.status === 401) {
    stale("The admin token is missing or wrong: nothing is shown.");
    switches.askToken();
  } else if (error.status === undefined) {
    stale(`Error in this page: ${error.message}`);
    console.error(error);
  } else {
    const since = state.heard === null ? "" : ` The data shown is of ${clock(state.heard / 1000)}.`;
    stale(`No answer from Foretell: ${error.message}.${since} Retrying.`);
  }
}

/** Shows why the data is old; `null`: it is current. */
function stale(why) {
  const banner = byId("stale");
  name(banner, "hidden", why === null ? "" : null);
  say(banner, why ?? "");
  name(document.body, "class", why === null ? null : "old");
}

function spans(chosen) {
  state.span = chosen;
  name(byId("span-lately"), "aria-pressed", chosen === "lately");
  name(byId("span-since"), "aria-pressed", chosen === "since_start");
  if (state.status !== undefined) show(state.status);
}

sections.prepare();
sessions.prepare();
switches.prepare(() => refresh(true));
byId("span-lately").addEventListener("click", () => spans("lately"));
byId("span-since").addEventListener("click", () => spans("since_start"));
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) refresh(false);
});
refresh(true);
