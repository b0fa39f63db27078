// The last sessions: a list with filters, and the rounds of the selected one.

import { get } from "./api.js";
import { squares } from "./charts.js";
import { absolute, ago, byId, element, figure, list, millis, name, rows, say, share, whole } from "./dom.js";

const FILTERS = ["path", "reason", "policy"];
let sessions = [];
let chosen = null;
let now = 0;

/** The value that a filter compares. */
const value = {
  path: (session) => session.path,
  reason: (session) => session.reason ?? "none",
  policy: (session) => session.policy ?? "none",
};

export function prepare() {
  for (const filter of FILTERS) byId(`filter-${filter}`).addEventListener("change", show);
  byId("session-list").tBodies[0].addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-key]");
    if (row === null || row.dataset.key === "nothing") return;
    choose(Number(row.dataset.key), event.target.closest("button") !== null);
  });
}

/** Takes a new list. */
export function take(found, at) {
  sessions = found;
  now = at;
  for (const filter of FILTERS) options(byId(`filter-${filter}`), value[filter]);
  show();
}

/** Updates the relative times in the list. */
export function tick(at) {
  now = at;
  show();
}

function options(select, of) {
  const kept = select.value;
  const values = [...new Set(sessions.map(of))].sort();
  if (kept !== "" && !values.includes(kept)) values.push(kept);
  const all = [{ key: "", text: "all" }, ...values.map((text) => ({ key: text, text }))];
  list(select, all, (each) => each.key, (each) => element("option", { value: each.key }), (node, each) => say(node, each.text));
  select.value = kept;
}

function show() {
  const wanted = FILTERS.map((filter) => [value[filter], byId(`filter-${filter}`).value]).filter(([, text]) => text !== "");
  const shown = sessions.filter((session) => wanted.every(([of, text]) => of(session) === text));
  say(byId("shown"), sessions.length === 0 ? "" : `${shown.length} of ${sessions.length}`);
  const body = byId("session-list").tBodies[0];
  rows(body, shown, (session) => session.number, cells, sessions.length === 0 ? "No completion yet." : "None of these.");
  for (const row of body.rows) {
    const here = row.dataset.key === String(chosen);
    name(row, "class", here ? "chosen" : null);
    const button = row.querySelector("button");
    if (button !== null) name(button, "aria-expanded", here);
  }
}

function cells(session) {
  const ended = Date.parse(session.time) / 1000 + session.duration_ms / 1000;
  const failed = session.error !== null || session.status >= 500;
  return [
    { same: String(session.number), node: () => opener(ended), fill: (button) => dated(button, session, ended) },
    { text: session.path, class: session.path },
    { text: session.reason ?? "–", title: session.parameter },
    { text: session.policy?.split("@")[0] ?? "–", title: session.policy, class: "name" },
    { text: session.model ?? "–", title: session.model, class: "name" },
    { text: session.client_gone ? `${session.status}, client left` : String(session.status), class: failed ? "bad" : null },
    whole(session.rounds_played),
    session.drafted > 0 ? `${whole(session.accepted)} of ${whole(session.drafted)}` : "–",
    session.output_tokens > 0 ? whole(session.output_tokens) : "–",
    millis(session.duration_ms),
  ];
}

function opener(ended) {
  const time = element("time", { datetime: new Date(ended * 1000).toISOString() });
  return element("button", { type: "button", class: "link", title: absolute(ended), "aria-controls": "session" }, time);
}

function dated(button, session, ended) {
  say(button.firstChild, ago(now - ended));
  name(button, "aria-label", `Rounds of session ${session.number}, ${session.path}, ended ${ago(now - ended)}`);
}

// ------------------------------------------------------------------------------------------------ one session

async function choose(number, byButton) {
  if (chosen === number) return close(number);
  chosen = number;
  show();
  const place = byId("session");
  try {
    const session = await get(`/api/sessions/${number}`);
    if (chosen !== number) return;
    place.replaceChildren(...detail(session));
  } catch (error) {
    const gone = error.status === 404 ? "No longer stored: only the last 50 sessions are." : `Not available: ${error.message}.`;
    place.replaceChildren(heading(number), element("p", { class: "empty" }, gone));
  }
  name(place, "hidden", null);
  // The focus moves to the details, for users of the keyboard.
  if (byButton) place.querySelector("h3").focus();
  place.scrollIntoView({ block: "nearest" });
}

function close(number) {
  chosen = null;
  name(byId("session"), "hidden", "");
  show();
  const row = [...byId("session-list").tBodies[0].rows].find((row) => row.dataset.key === String(number));
  (row?.querySelector("button") ?? byId("filter-path")).focus();
}

function heading(number) {
  const shut = element("button", { type: "button", class: "quiet" }, "Close");
  shut.addEventListener("click", () => close(number));
  return element("div", { class: "title" }, element("h3", { tabindex: "-1" }, `Session ${number}`), shut);
}

function detail(session) {
  const facts = [
    ["Request id", session.id],
    ["Began", absolute(Date.parse(session.time) / 1000)],
    ["Path", session.path],
    ["Reason", session.reason === null ? "–" : [session.reason, session.parameter].filter(Boolean).join(": ")],
    ["Policy", session.policy ?? "–"],
    ["Model", session.model ?? "–"],
    ["Backend", session.backend === "" ? "–" : session.backend],
    ["Output", session.output_tokens > 0 ? `${whole(session.output_tokens)} tokens` : "not known"],
    ["First byte", millis(session.first_byte_ms)],
    ["Time", millis(session.duration_ms)],
    ["Drafted", `${whole(session.drafted)}, accepted ${share(session.accepted, session.drafted)}`],
    ["Error", session.error ?? "none"],
  ];
  const terms = facts.map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", {}, text)));
  return [heading(session.number), element("dl", { class: "facts" }, ...terms), rounds(session)];
}

function rounds(session) {
  if (session.rounds.length === 0) return element("p", { class: "empty" }, "No round: the request was not speculated on.");
  const titles = [["Round", ""], ["Drafter", ""], ["Drafted", "n"], ["Accepted", "n"], ["Rejected", "n"], ["Draft", "n"], ["Verify", "n"], ["Tokens", ""]];
  const head = element("tr", {}, ...titles.map(([title, kind]) => element("th", { scope: "col", class: kind || null }, title)));
  const skipped = session.rounds_played - session.rounds.length;
  const lines = session.rounds.map((round, place) => element("tr", {},
    element("th", { scope: "row" }, String(skipped + place + 1)),
    element("td", {}, round.drafter),
    ...[round.drafted, round.accepted, round.drafted - round.accepted].map((count) => element("td", { class: "n" }, whole(count))),
    ...[round.draft_ms, round.verify_ms].map((ms) => element("td", { class: "n" }, millis(ms))),
    element("td", {}, squares(round.drafted, round.accepted))));
  const caption = skipped > 0 ? `The last ${session.rounds.length} of ${session.rounds_played} rounds` : `${session.rounds.length} ${session.rounds.length === 1 ? "round" : "rounds"}, mean acceptance length ${figure(1 + session.accepted / session.rounds_played)}`;
  const table = element("table", { id: "rounds" }, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...lines));
  return element("div", { class: "list scroll", tabindex: "0", role: "region", "aria-label": `Rounds of session ${session.number}` }, table);
}
