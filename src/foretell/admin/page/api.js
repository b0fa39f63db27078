// The admin API: every request of the page, with the token if one is needed. The token lives as long
// as its tab.

const KEY = "foretell-admin-token";
const WITHIN_MS = 5000;

/** An error answer; `status` 0: there was no answer. */
export class Refused extends Error {
  constructor(status, message, body) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

export const token = {
  given: () => sessionStorage.getItem(KEY) !== null,
  keep: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

async function ask(path, options) {
  const headers = { ...options.headers };
  const kept = sessionStorage.getItem(KEY);
  if (kept !== null) headers.authorization = `Bearer ${kept}`;
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(WITHIN_MS), ...options, headers });
  } catch (error) {
    throw new Refused(0, error.name === "TimeoutError" ? "the process did not answer in time" : "the process cannot be reached");
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) {
    throw new Refused(answer.status, body?.error?.message ?? `it answered ${answer.status}`, body);
  }
  return body;
}

export const get = (path) => ask(path, {});

export function post(path, body) {
  if (body === undefined) return ask(path, { method: "POST" });
  return ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}
