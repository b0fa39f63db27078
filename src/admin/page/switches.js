// What an operator may switch: the mode, the policies' files, and the end of the process. Each asks first.

import { post, token } from "./api.js";
import { byId, duration, element, list, name, say } from "./dom.js";
import { problems, told } from "./sections.js";

let refresh = () => {};

const MEANS = {
  auto: "Requests leap where it pays.",
  observe: "Requests ride; drafts are made in the shadow, and nothing leaps.",
  off: "Everything is relayed, and nothing leaps.",
};

export function prepare(after) {
  refresh = after;
  submitted("mode-form", mode);
  submitted("reload-form", reload);
  submitted("drain-form", drain);
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
  submitted("token-form", () => {
    token.keep(byId("token-typed").value.trim());
    byId("token-typed").value = "";
    byId("token").close();
    name(byId("token-ask"), "hidden", null);
    refresh();
  });
  byId("token-ask").addEventListener("click", () => askToken("Give another token, or close this."));
}

/** Nothing is ever sent by a form itself. */
function submitted(id, act) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Asks for the token; `why` says what was wrong with the last one. */
export function askToken(why) {
  const dialog = byId("token");
  say(byId("token-text"), why ?? "This admin API wants its token (admin.token_file). It is kept in this tab only.");
  name(byId("token-ask"), "hidden", null);
  if (!dialog.open) dialog.showModal();
}

/** Shows the modes that hold now. */
export function show(status) {
  const { process, backends } = status.mode;
  const rest = (held) => (held.ends_in_seconds === null ? "" : ` for ${duration(held.ends_in_seconds)} more, then ${held.base}`);
  const own = backends.filter((backend) => backend.own !== null).map((backend) => `${backend.name}: ${backend.own.mode}${rest(backend.own)}`);
  say(byId("mode-now"), `Now ${process.mode}${rest(process)}.${own.length > 0 ? ` Of single backends ${own.join("; ")}; the stricter one counts.` : ""}`);
  const select = byId("mode-backend");
  const kept = select.value;
  const options = [{ key: "", text: "the whole process" }, ...backends.map(({ name }) => ({ key: name, text: `backend ${name}` }))];
  list(select, options, (each) => each.key, (each) => element("option", { value: each.key }), (node, each) => say(node, each.text));
  select.value = kept;
  for (const form of ["mode-form", "reload-form", "drain-form"]) {
    name(byId(form).querySelector("button"), "disabled", status.draining ? "" : null);
  }
}

/** Asks in a dialog, for a word to be typed if there is one, and then acts. */
function confirm({ title, text, yes, word, act }) {
  const dialog = byId("confirm");
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-yes"), yes);
  name(byId("confirm-yes"), "class", word === undefined ? null : "danger");
  name(byId("confirm-label"), "hidden", word === undefined ? "" : null);
  say(byId("confirm-ask"), word === undefined ? "" : `Type “${word}” to go on:`);
  const typed = byId("confirm-typed");
  typed.value = "";
  const ready = () => word === undefined || typed.value.trim() === word;
  const check = () => name(byId("confirm-yes"), "disabled", ready() ? null : "");
  typed.oninput = check;
  check();
  byId("confirm-form").onsubmit = (event) => {
    event.preventDefault();
    if (!ready()) return;
    dialog.close();
    act();
  };
  dialog.showModal();
}

/** Does it, says what came of it, and shows the new state. */
async function done(what, act) {
  const said = byId("said");
  name(said, "class", "said");
  say(said, `${what} …`);
  try {
    say(said, await act());
    name(said, "class", "said good");
  } catch (error) {
    say(said, `${what}: ${error.message}.`);
    name(said, "class", "said bad");
    if (error.status === 401) askToken("The token was not taken. Give it again.");
  }
  refresh();
}

function mode() {
  const [wanted, backend, ttl] = ["mode-wanted", "mode-backend", "mode-ttl"].map((id) => byId(id).value);
  const of = backend === "" ? "the whole process" : `backend ${backend}`;
  const long = ttl === "" ? "for good" : `for ${byId("mode-ttl").selectedOptions[0].textContent}`;
  const asked = { mode: wanted, ...(backend === "" ? {} : { backend }), ...(ttl === "" ? {} : { ttl }) };
  confirm({
    title: `Switch ${of} to ${wanted}, ${long}?`,
    text: `${MEANS[wanted]} Requests under way go on without a break.`,
    yes: `Switch to ${wanted}`,
    act: () => done("Switching the mode", async () => {
      const set = await post("/api/mode", asked);
      const stricter = set.mode === wanted ? "" : ` It is ${set.mode} all the same: the stricter of process and backend counts.`;
      return `Mode ${wanted} set for ${of}, ${long}.${stricter}`;
    }),
  });
}

function reload() {
  const errors = byId("reload-errors");
  confirm({
    title: "Read the policies again?",
    text: "All of the files are taken, or none of them: if one is wrong, the policies in force stay.",
    yes: "Read them",
    act: () => done("Reading the policies", async () => {
      problems(errors, [], null);
      try {
        const taken = await post("/api/reload");
        const left = taken.refused.length;
        return `Taken: ${taken.policies.map(({ name, revision }) => `${name}@${revision}`).join(", ")}.${left > 0 ? " Some settings wait for a restart." : ""}`;
      } catch (error) {
        if (error.status !== 422) throw error;
        const found = error.body.errors.map((problem, place) => ({ level: "bad", key: place, text: told(problem) }));
        problems(errors, found, null);
        throw Object.assign(error, { message: "refused, and the policies in force stay" });
      }
    }),
  });
}

function drain() {
  confirm({
    title: "Drain this process?",
    text: "It takes no new requests, answers those under way, and ends. It cannot be taken back from here.",
    yes: "Drain",
    word: "drain",
    act: () => done("Draining", async () => {
      await post("/api/drain");
      return "It drains, and ends once the requests under way are answered.";
    }),
  });
}
