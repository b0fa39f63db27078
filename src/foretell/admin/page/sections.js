// The read-only sections: each takes an answer of the API and writes it into the page.

import { interval, places, Plot } from "./charts.js";
import { absolute, ago, byId, clock, duration, element, figure, list, millis, name, percent, rows, say, share, whole } from "./dom.js";

const body = (id) => byId(id).tBodies[0];

// ------------------------------------------------------------------------------------------------ top

/** The most important problem, in a few words; `null` if there is none. */
function trouble(status) {
  if (status.draining) return "draining";
  const out = status.out.length > 0 ? `outage: ${status.out.join(", ")}` : null;
  const files = status.synchronized === false ? "the configuration's files are not in force" : null;
  const wrong = [out, files].filter(Boolean);
  // The words of /readyz.
  if (status.unready !== null) return status.unready;
  return wrong.length > 0 ? ["ready", ...wrong].join("; ") : null;
}

export function top(status) {
  say(byId("version"), status.version);
  const state = trouble(status) ?? "ready";
  say(byId("state"), state);
  name(byId("state"), "class", `chip ${state === "ready" ? "good" : "bad"}`);
  const title = state === "ready" ? "Foretell" : `${state.replace(/^ready; /, "")} – Foretell`;
  if (document.title !== title) document.title = title;
  const { mode, ends_in_seconds: rest } = status.mode.process;
  say(byId("mode"), `mode ${mode}${rest === null ? "" : `, for ${duration(rest)} more`}`);
  name(byId("mode"), "class", `chip ${mode === "auto" ? "good" : "warn"}`);
  say(byId("uptime"), `up ${duration(status.uptime_seconds)}`);
  name(byId("uptime"), "title", `since ${absolute(status.started)}`);
  say(byId("updated"), `as of ${clock(status.now)}`);
  name(byId("updated"), "title", absolute(status.now));
}

// ------------------------------------------------------------------------------------------------ helping

/** The comparisons of all policies: `fast` is the measured speedup by speculation, `would` the
 * projected one. */
function comparisons(status) {
  return status.compared.flatMap(({ policy, backends }) => backends.map((entry) => {
    const ratio = entry.time_per_token_ratio;
    const would = entry.projected_speedup;
    const fast = ratio === null ? null : { low: 1 / ratio.high, middle: 1 / ratio.middle, high: 1 / ratio.low };
    return { policy, ...entry, fast, would: would === null ? null : { ...would.ratio, requests: would.requests, basis: would.basis } };
  }));
}

const times = ({ low, middle, high }) => `${figure(middle)} times (${figure(low)} to ${figure(high)})`;
const BASIS = { guess: "from guessed verification costs", probe: "from the verification costs that a probe measured", measured: "from measured verification costs" };

/** The answer: a word, and one or two sentences. */
function summary(status) {
  const { completions } = status.since_start;
  const out = status.out.length > 0;
  const dead = out ? [`No replica of ${status.out.length === 1 ? "backend" : "backends"} ${status.out.join(", ")} answers.`] : [];
  const first = out ? "Outage." : "";
  if (completions === 0) return [first, [...dead, "No completion yet."].join(" ")];
  const all = comparisons(status).filter(({ backend }) => !status.out.includes(backend));
  const most = (which, requests) => all.filter(which).sort((a, b) => requests(b) - requests(a))[0];
  const best = most((entry) => entry.fast !== null, (entry) => entry.requests.speculating);
  const would = most((entry) => entry.would !== null, (entry) => entry.would.requests);
  const of = (entry) => (all.length > 1 ? ` (${entry.policy} at ${entry.backend})` : "");
  const said = dead;
  let word = first;
  if (status.mode.process.mode === "off") said.push("Switched off: everything is passed through.");
  if (status.mode.process.mode === "observe") said.push("Mode observe: no request is speculated on.");
  if (best !== undefined) {
    const { low, high } = best.fast;
    if (!out) word = low > 1 ? "Yes." : high < 1 ? "No." : "Inconclusive.";
    const was = status.mode.process.mode === "auto" ? "are" : "were";
    said.push(`Requests with speculation ${was} ${times(best.fast)} as fast as the control group${of(best)}.`);
  }
  if (would !== undefined && (best === undefined || status.mode.process.mode !== "auto")) {
    said.push(`Projected: ${times(would.would)} as fast as plain decoding, ${BASIS[would.would.basis] ?? would.would.basis}${of(would)}.`);
  }
  if (best === undefined && would === undefined && status.mode.process.mode !== "off" && (all.length > 0 || !out)) {
    const [free, held] = all.reduce((sum, entry) => [sum[0] + entry.requests.speculating, sum[1] + entry.requests.control_group], [0, 0]);
    said.push(`Too early to say: ${whole(free)} ${free === 1 ? "request" : "requests"} with speculation and ${whole(held)} in the control group; ten pairs are needed.`);
  }
  return [word, said.join(" ")];
}

/** The state of a policy at a backend: that of its gates at the replicas. */
function state(status, { policy, backend }) {
  const at = status.gates.filter((each) => each.policy === policy && each.backend === backend);
  const closed = at.map(({ gates }) => gates.filter(({ open }) => !open).map(({ gate }) => gate)).filter((gates) => gates.length > 0);
  if (closed.length === 0) return { text: "open" };
  const where = closed.length < at.length ? ` at ${closed.length} of ${at.length} replicas` : "";
  return { text: `closed${where}: ${[...new Set(closed.flat())].join(", ")}`, class: "bad" };
}

function tile(title, [value, unit], more) {
  return { title, value, unit, more };
}

function tiles(status, span) {
  const sums = status[span];
  const seconds = span === "lately" ? status.lately_seconds : status.uptime_seconds;
  const [rounds, drafted, accepted] = sums.drafters.reduce((sum, each) =>
    [sum[0] + each.rounds, sum[1] + each.drafted, sum[2] + each.accepted], [0, 0, 0]);
  const pace = (group) => (group.seconds_per_token === null ? ["–", ""] : [figure(1 / group.seconds_per_token), "tokens/s"]);
  const token = (group) => (group.seconds_per_token === null ? "no request yet"
    : `${millis(1000 * group.seconds_per_token)} per token, ${whole(group.requests)} ${group.requests === 1 ? "request" : "requests"}`);
  return [
    tile("Output, all requests", sums.completions > 0 ? [figure(sums.tokens / seconds), "tokens/s"] : ["–", ""],
      `${whole(sums.completions)} completions, ${whole(sums.tokens)} tokens`),
    tile("Speculated requests", pace(sums.speculated), token(sums.speculated)),
    tile("Control group", pace(sums.control_group), token(sums.control_group)),
    tile("Drafted tokens accepted", drafted > 0 ? [((100 * accepted) / drafted).toFixed(1), "%"] : ["–", ""],
      rounds > 0 ? `${figure(drafted / rounds)} per draft, ${whole(rounds)} rounds` : "no round yet"),
  ];
}

export function helping(status, span) {
  const [word, sentences] = summary(status);
  say(byId("summary-word"), word);
  name(byId("summary-word"), "class", status.out.length > 0 ? "bad" : null);
  say(byId("summary"), sentences);
  const make = () => element("div", {}, element("dt", {}),
    element("dd", {}, element("strong", {}), " ", element("span", { class: "unit" }), element("small", {})));
  list(byId("tiles"), tiles(status, span), (each) => each.title, make, (node, each) => {
    say(node.firstChild, each.title);
    const [value, unit, more] = node.lastChild.children;
    say(value, each.value);
    say(unit, each.unit);
    say(more, each.more);
  });
  rows(body("groups"), comparisons(status), (each) => `${each.policy} ${each.backend}`, (each) => {
    const known = each.fast ?? each.would;
    const words = known === null ? "no figure yet" : `${each.fast === null ? "projected: " : ""}${times(known)}`;
    return [
      { text: each.policy, class: "name" },
      { text: each.backend, class: "name" },
      known === null ? { text: words, class: "muted" } : {
        same: words,
        node: () => element("span", { class: "told" }, interval(known.low, known.middle, known.high), element("span", {}, words)),
      },
      whole(each.requests.speculating),
      whole(each.requests.control_group),
      state(status, each),
    ];
  }, "No request has been compared yet.");
}

// ------------------------------------------------------------------------------------------------ wrong

/** What to do about a problem, by the name of its alert. */
const RUNBOOK = "https://github.com/foretell-proxy/foretell/blob/main/docs/runbook.md";
const runbook = (alert) => `${RUNBOOK}#${alert.toLowerCase()}`;
/** Time for which a change of the model at an address is shown. */
const CHANGED_SECONDS = 86400;

export function wrong(status, replicas, policies) {
  const found = [];
  const add = (level, key, text, href = null) => found.push({ level, key, text, href });
  if (status.draining) add("bad", "draining", "The process drains: it takes no new requests.");
  else if (status.unready !== null) add("bad", "unready", `Not ready: ${status.unready}.`);
  if (status.synchronized === false) {
    const problems = policies?.refused?.length ?? 0;
    add("bad", "files", `The configuration files on disk are not in force${problems > 0 ? `: ${problems} ${problems === 1 ? "problem" : "problems"}, listed below` : ""}.`);
  }
  for (const backend of status.out) {
    const ready = status.unready === null && !status.draining ? " /readyz still says ready, because ready.require_backend is false." : "";
    add("bad", `out ${backend}`, `Outage: no replica of backend ${backend} answers; requests to it fail or wait.${ready}`, runbook("ForetellReplicaDown"));
  }
  if (status.nothing_eligible) add("bad", "eligible", `Nothing is eligible: ${status.nothing_eligible}.`);
  for (const replica of replicas ?? []) {
    if (replica.state !== "ready") {
      const cause = replica.last_error === null ? "" : `: ${replica.last_error.text}`;
      add(replica.state === "disabled" ? "warn" : "bad", `state ${replica.name}`, `Replica ${replica.name} at ${replica.url} is ${replica.state}${cause}`, replica.state === "disabled" ? null : runbook(replica.state === "silent" ? "ForetellReplicaSilent" : "ForetellReplicaDown"));
    }
    const changed = replica.model_changed ?? null;
    if (changed !== null && status.now - changed.at < CHANGED_SECONDS) {
      add("warn", `model ${replica.name}`, `The model at ${replica.url} (${replica.name}) changed from ${changed.from} to ${changed.to} ${ago(status.now - changed.at)}.`);
    }
    for (const { route, cause } of replica.unreadable) {
      add("bad", `unreadable ${replica.name} ${route}`, `Replica ${replica.name}: answers of ${route} cannot be read (${cause}). Its requests are passed through. Look for a gateway between Foretell and the engine that rewrites answers.`);
    }
    if (replica.problem) add("warn", `problem ${replica.name}`, `Replica ${replica.name}: ${replica.problem}.`);
    if (replica.probe?.pays === false) add("warn", `probe ${replica.name}`, `Replica ${replica.name}: ${replica.probe.conclusion}`);
  }
  for (const { policy, backend, closed } of comparisons(status)) {
    if (closed) add("warn", `closed ${policy} ${backend}`, `Speculation under ${policy} was slower than plain decoding at ${backend}; speculation is retried later.`);
  }
  if (status.recording !== null) add("bad", "recording", `Requests are not recorded: ${status.recording}`, runbook("ForetellRecordingFails"));
  const { failed, completions, disconnected } = status.lately;
  if (failed > 0) add("warn", "failed", `${whole(failed)} of ${whole(completions)} completions of the last 15 min ended with an error.`);
  if (disconnected > 0) add("warn", "disconnected", `${whole(disconnected)} of ${whole(completions)} clients of the last 15 min disconnected before the end of their answer.`);
  if (status.mode.process.mode !== "auto") add("warn", "mode", `Mode ${status.mode.process.mode}: no request is speculated on.`);
  for (const backend of status.mode.backends) {
    if (backend.mode !== status.mode.process.mode) add("warn", `mode ${backend.name}`, `Mode ${backend.mode} at backend ${backend.name}: no request is speculated on there.`);
  }
  problems(byId("problems"), found, "No known problems.");
}

/** A list of `{ level, key, text, href }`, where `href` says what to do; `none` is shown if it is empty. */
export function problems(node, found, none) {
  const shown = found.length > 0 || none === null ? found : [{ level: "good", key: "none", text: none }];
  const make = () => element("li", {}, element("span", {}), " ", element("a", { rel: "noreferrer", target: "_blank" }));
  list(node, shown, (each) => each.key, make, (item, each) => {
    const [text, link] = item.children;
    say(text, each.text);
    say(link, each.href ? "What to do" : "");
    name(link, "href", each.href ?? null);
    name(item, "class", each.level);
  });
}

// ------------------------------------------------------------------------------------------------ over time

const rate = (part, all) => (all > 0 ? part / all : null);
const PLOTS = [
  new Plot("Output", "tokens/s", (s) => s.tokens / s.seconds, figure),
  new Plot("Completions", "per second", (s) => s.completions / s.seconds, figure),
  new Plot("Accepted", "of drafted", (s) => rate(s.accepted, s.drafted), percent, 1),
  new Plot("Gamma", "drafted per round", (s) => rate(s.drafted, s.rounds), figure),
  new Plot("Load", "of the busiest engine", (s) => s.load, percent, 1),
  new Plot("Tolerance τ", "at temperature 1", (s) => s.tolerance, figure),
];

export function prepare() {
  byId("plots").replaceChildren(...PLOTS.map((plot) => plot.node));
}

export function overTime(status, samples) {
  for (const plot of PLOTS) plot.draw(samples, status.now);
  const exact = status.relaxed_by.length === 0;
  name(PLOTS.at(-1).node, "class", exact ? "plot none" : "plot");
  name(PLOTS.at(-1).node, "data-none", exact ? "Every policy is exact." : null);
}

// ------------------------------------------------------------------------------------------------ why not

export function why(status, span) {
  const { reasons, completions } = status[span];
  const sorted = [...reasons].sort((a, b) => b.requests - a.requests);
  const make = () => element("li", {}, element("span", { class: "words" }), element("span", { class: "count" }), element("span", { class: "track" }, element("span", {})));
  const shown = sorted.length > 0 ? sorted : [{ kind: "none", reason: "", words: completions === 0 ? "No completion yet." : "Every completion was speculated on to its end.", requests: 0 }];
  list(byId("reasons"), shown, (each) => `${each.kind} ${each.reason}`, make, (item, each) => {
    const [words, count, track] = item.children;
    say(words, each.reason === "" ? each.words : `${each.words} · ${each.reason}`);
    say(count, each.requests > 0 ? `${whole(each.requests)} (${share(each.requests, completions)})` : "");
    track.firstChild.style.width = `${completions > 0 ? (100 * each.requests) / completions : 0}%`;
    name(item, "class", each.kind);
    name(item, "title", { plain: "plain", passthrough: "passthrough" }[each.kind]);
  });
  gates(status);
}

function gates(status) {
  const head = byId("gates").tHead.rows[0];
  const names = status.gates[0]?.gates.map(({ gate }) => gate) ?? [];
  if (head.cells.length !== names.length + 2) {
    head.replaceChildren(...["Policy", "Replica", ...names].map((title) => element("th", { scope: "col" }, title)));
  }
  const closed = new Map();
  rows(body("gates"), status.gates, (each) => `${each.policy} ${each.replica}`, (each) => [
    { text: each.policy, class: "name" },
    { text: each.replica, class: "name" },
    ...names.map((wanted) => {
      const gate = each.gates.find(({ gate }) => gate === wanted);
      const at = `${wanted} at ${each.replica}: ${gate.words}`;
      if (!gate.open) closed.set(at, [...(closed.get(at) ?? []), each.policy]);
      return { text: gate.open ? "open" : "closed", class: gate.open ? "open" : "bad" };
    }),
  ], "No policy drafts, so there is no gate.");
  const told = [...closed].map(([at, policies]) => ({ key: at, text: `${at} (${policies.join(", ")})` }));
  const shown = told.length > 0 ? told : [{ key: "none", text: status.gates.length > 0 ? "Every gate is open." : "" }];
  list(byId("gates-why"), shown, (each) => each.key, () => element("li", {}), (item, each) => say(item, each.text));
}

// ------------------------------------------------------------------------------------------------ coverage

/** Rows of the coverage report that are shown. */
const COVERED = 12;

export function coverage(report) {
  say(byId("coverage-told"), `${report.sentence}.`);
  rows(body("covered"), report.rows.slice(0, COVERED), (each) => JSON.stringify([each.policy, each.backend, each.route, each.path, each.reason]), (each) => [
    each.path,
    { text: each.reason || "none", class: each.reason === "" ? "muted" : null },
    each.route,
    { text: each.policy || "none", class: each.policy === "" ? "muted" : "name" },
    { text: each.backend || "none", class: each.backend === "" ? "muted" : "name" },
    whole(each.requests),
    whole(each.tokens),
    share(each.tokens, report.tokens),
  ], "No request for text has ended yet.");
  const hidden = report.rows.length - COVERED;
  const estimated = report.estimated_tokens > 0 ? ` ${share(report.estimated_tokens, report.tokens)} of the tokens are estimated, of answers that did not report their usage.` : "";
  say(byId("coverage-note"), `Output tokens since the start, of all requests for text, passed-through ones included.${estimated}${hidden > 0 ? ` ${whole(hidden)} smaller rows are in /api/coverage.` : ""}`);
}

// ------------------------------------------------------------------------------------------------ drafts

const LOADS = ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"];

/** The longer the drafts of a temperature and load, the darker. */
function conditions(cells) {
  const longest = Math.max(1, ...cells.map((each) => each.drafted / each.rounds));
  const temperatures = [...new Set(cells.map((each) => each.temperature))];
  rows(body("conditions"), temperatures, (each) => each, (temperature) => [temperature, ...LOADS.map((load) => {
    const cell = cells.find((each) => each.temperature === temperature && each.load === load);
    if (cell === undefined) return { text: "–", class: "muted" };
    const gamma = cell.drafted / cell.rounds;
    const tolerance = cell.tolerance > 0 ? `, τ ${figure(cell.tolerance)}` : "";
    const fill = (node) => {
      say(node, `${figure(gamma)}, ${share(cell.accepted, cell.drafted)}${tolerance}`);
      node.style.setProperty("--part", `${Math.round((30 * gamma) / longest)}%`);
    };
    return { node: () => element("span", { class: "heat" }), same: "heat", fill, title: `${whole(cell.rounds)} rounds` };
  })], "No round yet.");
}

const DRAFTERS = { prompt_lookup: "prompt lookup", none: "none (an empty round)" };

export function drafts(status, span) {
  const drafters = [...status[span].drafters].sort((a, b) => b.rounds - a.rounds);
  rows(body("drafters"), drafters, (each) => each.drafter, (each) => [
    DRAFTERS[each.drafter] ?? each.drafter,
    whole(each.rounds),
    figure(each.drafted / each.rounds),
    share(each.accepted, each.drafted),
    figure(1 + each.accepted / each.rounds),
    millis((1000 * each.draft_seconds) / each.rounds),
    millis((1000 * each.verify_seconds) / each.rounds),
  ], "No round yet.");
  conditions(status[span].conditions);
  const figures = drafters.filter((each) => each.positions.length > 0);
  const shown = figures.length > 0 ? figures : [{ drafter: "", places: [] }];
  const make = () => element("div", { class: "drafter" }, element("span", {}), element("span", { class: "scroll" }), element("small", {}));
  const caption = byId("places").firstElementChild;
  let holder = caption.nextElementSibling;
  if (holder === null) {
    holder = element("div", {});
    byId("places").append(holder);
  }
  list(holder, shown, (each) => each.drafter, make, (node, each) => {
    const same = JSON.stringify(each.positions);
    if (node.dataset.same === same) return;
    node.dataset.same = same;
    const [title, plot, ends] = node.children;
    say(title, each.drafter === "" ? "No round yet." : DRAFTERS[each.drafter] ?? each.drafter);
    plot.replaceChildren(...(each.positions.length > 0 ? [places(each.drafter, each.positions)] : []));
    const first = each.positions[0];
    const last = each.positions.at(-1);
    say(ends, first === undefined ? "" : `position 1: ${share(first[1], first[0])}${each.positions.length > 1 ? `, position ${each.positions.length}: ${share(last[1], last[0])}` : ""}`);
  });
}

// ------------------------------------------------------------------------------------------------ replicas, policies

export function replicas(found, now) {
  const table = body("replica-list");
  rows(table, found, (each) => each.name, (each) => {
    const { load, last_error: error, probe } = each;
    const engine = [each.engine, probe?.version].filter(Boolean).join(" ");
    return [
      { text: each.name, title: each.url, class: "name" },
      { text: each.state, class: each.state === "ready" ? "good" : "bad" },
      { text: each.breaker.replace("_", " "), class: each.breaker === "closed" ? null : "bad" },
      { text: engine, title: each.engine_start, class: "name" },
      whole(each.in_flight),
      load === null ? "–" : whole(load.running),
      load === null ? "–" : whole(load.waiting),
      load === null || load.kv_usage === null ? "–" : percent(load.kv_usage),
      each.inject === null ? { text: probe?.conclusion ?? "not probed", title: probed(probe), class: "words" }
        : { text: injected(each.inject), title: stepCosts(each.inject), class: "words" },
      { text: learnt(each.costs), title: allLearnt(each.costs), class: "words" },
      error === null ? { text: "none", class: "muted" }
        : { text: `${ago(error.age_seconds)}: ${error.text}`, title: absolute(now - error.age_seconds), class: "words bad" },
    ];
  }, "No replica.");
}

/** What drafts inside an engine's steps have done. */
function injected({ drafted, accepted, saved_seconds: saved, wasted_seconds: wasted, late, steps }) {
  const share = drafted > 0 ? `, ${percent(accepted / drafted)} of ${whole(drafted)} draft tokens accepted` : "";
  const tardy = late > 0 ? `; ${percent(late / Math.max(steps, 1))} of the answers late` : "";
  return `drafts inside its steps${share}, ${duration(saved)} saved, ${duration(wasted)} lost${tardy}`;
}

/** The costs of an engine's steps, in one line. */
function stepCosts({ cost, rows, most }) {
  if (cost === null) return null;
  return `a step of ${rows} rows takes ${millis(1000 * cost.plain_seconds)}, its first draft token ${millis(1000 * cost.first_token_seconds)} more, each draft token ${millis(1000 * cost.token_seconds)}; at most ${most} a row`;
}

/** The measurements of a probe, in one line. */
function probed(probe) {
  const token = probe?.times?.token?.[0];
  if (token === undefined) return null;
  const verify = (probe.verify ?? []).slice(0, 6).map((call) => `${call.method} of ${call.gamma} ${millis(call.ms)}`);
  return `a plain token ${millis(token.ms)}; ${verify.join(", ")}`;
}

/** The learnt costs at the lowest concurrency, in one line. */
function learnt(costs) {
  const plain = costs?.plain[0];
  if (plain === undefined) return "–";
  const verify = costs.verify[0];
  const call = verify === undefined ? "" : `; ${verifies(verify)}`;
  return `a plain token ${millis(plain.token_seconds * 1000)}${call}`;
}

/** The cost of a verify request, in words. */
function verifies(at) {
  return `${at.method} ${millis(at.base_seconds * 1000)}, each draft token ${millis(at.token_seconds * 1000)}`;
}

/** All learnt costs, a line for each kind of request, and how much speculation may still lose. */
function allLearnt(costs) {
  if (costs === null || costs === undefined) return null;
  const plain = costs.plain.map((at) => `${at.requests} in flight: a plain token ${millis(at.token_seconds * 1000)}`);
  const verify = costs.verify.map((at) => `${at.requests} in flight, context ${at.context}: ${verifies(at)}, beside plain requests ${millis(at.wait_seconds * 1000)} more`);
  const regret = `may still lose ${millis(costs.regret_remaining_seconds * 1000)} of ${millis(costs.regret_capacity_seconds * 1000)}`;
  return [...plain, ...verify, regret, `price of a draft token ${costs.price.toFixed(2)} plain tokens`].join("\n");
}

export function policies(answer) {
  rows(body("policy-list"), answer.policies, (each) => each.name, (each) => [
    { text: each.name, class: "name" },
    { text: each.revision, class: "mono" },
    each.mode,
    each.synchronized && answer.synchronized ? { text: "yes", class: "good" } : { text: "no: the files were refused", class: "bad" },
  ], "No policy.");
  const refused = answer.refused.map((problem) => ({ level: "bad", key: `${problem.file}:${problem.line}:${problem.path}`, text: told(problem) }));
  problems(byId("refused"), refused, null);
}

/** A problem of a configuration file in a line. */
export function told({ file, line, path, message }) {
  return [line > 0 ? `${file}:${line}` : file, path, message].filter(Boolean).join(": ");
}
