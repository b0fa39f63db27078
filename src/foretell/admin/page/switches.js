// The operator's switches: the mode, reloading the policies, and draining. Each asks for confirmation.

import { post, token } from "./api.js";
import { byId, duration, element, list, name, say } from "./dom.js";
import { problems, told } from "./sections.js";

let refresh = () => {};

const MEANS = {
  auto: "Requests are speculated on where it pays.",
  observe: "Requests decode plainly; shadow drafts are scored and not sent.",
  off: "Everything is passed through.",
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
  byId("token-ask").addEventListener("click", () => askToken("Enter another token, or close this dialog."));
}

/** Forms never submit by themselves. */
function submitted(id, act) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Asks for the token; `why`: the reason, if the last one was wrong. */
export function askToken(why) {
  const dialog = byId("token");
  say(byId("token-text"), why ?? "This admin API requires its token (admin.token_file). The token is stored in this tab only.");
  name(byId("token-ask"), "hidden", null);
  if (!dialog.open) dialog.showModal();
}

/** Shows the modes in force. */
export function show(status) {
  const { process, backends } = status.mode;
  const rest = (held) => (held.ends_in_seconds === null ? "" : ` for ${duration(held.ends_in_seconds)} more, then ${held.base}`);
  const overrides = backends.filter((backend) => backend.override !== null).map((backend) => `${backend.name}: ${backend.override.mode}${rest(backend.override)}`);
  say(byId("mode-now"), `Now ${process.mode}${rest(process)}.${overrides.length > 0 ? ` By backend: ${overrides.join("; ")}; the stricter mode applies.` : ""}`);
  const select = byId("mode-backend");
  const kept = select.value;
  const options = [{ key: "", text: "the whole process" }, ...backends.map(({ name }) => ({ key: name, text: `backend ${name}` }))];
  list(select, options, (each) => each.key, (each) => element("option", { value: each.key }), (node, each) => say(node, each.text));
  select.value = kept;
  for (const form of ["mode-form", "reload-form", "drain-form"]) {
    name(byId(form).querySelector("button"), "disabled", status.draining ? "" : null);
  }
}

/** Asks in a dialog, with a word to be typed if there is one, and then calls `act`. */
function confirm({ title, text, yes, word, act }) {
  const dialog = byId("confirm");
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-yes"), yes);
  name(byId("confirm-yes"), "class", word === undefined ? null : "danger");
  name(byId("confirm-label"), "hidden", word === undefined ? "" : null);
  say(byId("confirm-ask"), word === undefined ? "" : `Type “${word}” to continue:`);
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

/** Calls `act`, shows its outcome, and refreshes the page. */
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
    if (error.status === 401) askToken("The token was rejected. Enter it again.");
  }
  refresh();
}

function mode() {
  const [wanted, backend, ttl] = ["mode-wanted", "mode-backend", "mode-ttl"].map((id) => byId(id).value);
  const of = backend === "" ? "the whole process" : `backend ${backend}`;
  const long = ttl === "" ? "until changed" : `for ${byId("mode-ttl").selectedOptions[0].textContent}`;
  const asked = { mode: wanted, ...(backend === "" ? {} : { backend }), ...(ttl === "" ? {} : { ttl }) };
  confirm({
    title: `Switch ${of} to ${wanted}, ${long}?`,
    text: `${MEANS[wanted]} Requests in flight continue.`,
    yes: `Switch to ${wanted}`,
    act: () => done("Switching the mode", async () => {
      const set = await post("/api/mode", asked);
      const stricter = set.mode === wanted ? "" : ` The mode in force is ${set.mode}: the stricter of process and backend applies.`;
      return `Mode ${wanted} set for ${of}, ${long}.${stricter}`;
    }),
  });
}

function reload() {
  const errors = byId("reload-errors");
  confirm({
    title: "Reload the policies?",
    text: "All files are loaded, or none: if one has an error, the policies in force stay.",
    yes: "Reload",
    act: () => done("Reloading the policies", async () => {
      problems(errors, [], null);
      try {
        const taken = await post("/api/reload");
        const left = taken.refused.length;
        return `Loaded: ${taken.policies.map(({ name, revision }) => `${name}@${revision}`).join(", ")}.${left > 0 ? " Some settings need a restart." : ""}`;
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
    text: "The process takes no new requests, answers those in flight, and ends. This cannot be undone.",
    yes: "Drain",
    word: "drain",
    act: () => done("Draining", async () => {
      await post("/api/drain");
      return "Draining: the process ends once the requests in flight are answered.";
    }),
  });
}
