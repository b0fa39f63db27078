// Takes the pictures of the documentation: the status page under a mixed load, and a report of
// `foretell bench`. Run it by `make pictures`. docs/images/pictures.json lists the files that the
// pictures depend on with their hashes; tests/docs compares them.

import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { launch, open, serveFromTree } from "./browser.mjs";
import { paletted } from "./png.mjs";
import { FORETELL, ROOT, Serve, startTarget, until, workload } from "./proxy.mjs";

const IMAGES = join(ROOT, "docs/images");
/** Pathspecs of the files that determine the words and the layout of the pictures. */
const DEPENDS_ON = [
  "src/core/words/gate.rs", "src/core/words/plain_reason.rs", "src/core/words/passthrough_reason.rs", "src/foretell/admin/page",
  "src/foretell/bench/about.rs", "src/foretell/bench/html.rs", "src/foretell/bench/report.rs", "tests/page/pictures.mjs",
];
/** Maximum size of both pictures together, bytes. */
const MAX_BYTES = 500_000;
/** Costs of the emulated machine: a plain token takes 25 ms, a verify request of n tokens 1.2 + 0.025 n times as long. */
const PACE = "step=25ms,base=1.2,node=0.025";
/** Duration of the load before the picture, seconds, and its number of clients in each tenth of it. */
const SECONDS = 100;
const CLIENTS = [2, 3, 4, 4, 5, 4, 3, 2, 3, 4];
/** Workloads and alternations of the benchmark. Fewer than 6 alternations give no interval. */
const MEASURED = ["rewrite", "chat"];
const ALTERNATIONS = 8;

const DRAFTERS = "drafters: [{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }, { kind: model, model: draft-same, vocabulary: same }]\n";
const POLICIES = {
  "10-tickets": "version: 1\nname: tickets\nmode: off\nmatch: { headers: { x-team: [tickets] } }\n",
  "20-support-chat": `version: 1\nname: support-chat\nmode: shadow\nmatch: { headers: { x-team: [support] } }\n${DRAFTERS}`,
  "30-code-edits": `version: 1\nname: code-edits\n${DRAFTERS}holdback: { start: 0.3, floor: 0.25 }\n`,
};
/** 100 × 1.28 is the width of the pictures: text stays readable where a page shows them at two thirds of it. */
const VIEW = { viewport: { width: 1000, height: 900 }, deviceScaleFactor: 1.28, colorScheme: "light", timezoneId: "UTC" };

const prompts = Object.fromEntries(["rewrite", "completion", "chat"].map((name) => [name, workload(name)]));
const tools = [{ type: "function", function: { name: "search", parameters: { type: "object", properties: {} } } }];

/** The request of this number: most edit code; the others are decoded plainly or passed through, each for a reason. */
function request(number) {
  const of = (name, more = {}) => {
    const entry = prompts[name][number % prompts[name].length];
    return { ...entry, body: { ...entry.body, ...more } };
  };
  switch (number % 20) {
    case 3: case 9: case 15: return [of("chat"), { "x-team": "support" }];
    case 6: case 13: return [of("completion"), { "x-team": "tickets" }];
    case 11: return [of("rewrite"), { "x-foretell": "off" }];
    case 17: return number % 40 < 20 ? [of("chat", { tools }), {}] : [of("completion", { n: 2 }), {}];
    case 1: case 8: return [of("completion", { temperature: 0.7 }), {}];
    default: return [of("rewrite"), {}];
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Clients that send requests one after another until `stop` is called. */
function load(serve) {
  const start = Date.now();
  const clients = () => CLIENTS[Math.min(CLIENTS.length - 1, Math.floor((CLIENTS.length * (Date.now() - start)) / (1000 * SECONDS)))];
  let over = false;
  let next = 0;
  const client = async (number) => {
    while (!over) {
      if (number < clients()) await serve.ask(...request(next++));
      else await sleep(200);
    }
  };
  const all = Promise.all(Array.from({ length: Math.max(...CLIENTS) }, (_, number) => client(number)));
  return { stop: () => { over = true; return all; } };
}

/** The part of a page from its top to the end of the element that `selector` finds. */
async function picture(page, selector, name) {
  const below = await page.locator(selector).evaluate((node) => Math.ceil(node.getBoundingClientRect().bottom + scrollY) + 8);
  const png = await page.screenshot({ fullPage: true, clip: { x: 0, y: 0, width: VIEW.viewport.width, height: below } });
  writeFileSync(join(IMAGES, name), paletted(png));
}

function complain(wrong) {
  if (wrong.length > 0) throw new Error(wrong.join("\n"));
}

async function statusPage(browser, target) {
  const serve = await Serve.start(target, { policies: POLICIES, spare: false });
  try {
    // Requests that arrive before the backend is recognised are passed through; while it is probed they are not speculated on.
    await until("a probe", async () => (await serve.api("/api/replicas")).replicas.every(({ verify, probe }) => verify.length > 0 && probe !== null));
    const running = load(serve);
    await sleep(1000 * SECONDS);
    await until("a comparison and a projection", async () => {
      const compared = (await serve.api("/api/status")).compared.flatMap(({ backends }) => backends);
      return compared.some((each) => each.time_per_token_ratio !== null) && compared.some((each) => each.projected_speedup !== null);
    });
    const { page, context, wrong } = await open(browser, "about:blank", VIEW);
    await serveFromTree(context);
    await page.goto(`${serve.url}/`);
    await page.locator("#session-list button").first().waitFor();
    await picture(page, "#why", "status-page.png");
    await running.stop();
    complain(wrong);
    await context.close();
  } finally {
    await serve.end();
  }
}

async function benchReport(browser, target) {
  const folder = mkdtempSync(join(tmpdir(), "foretell-pictures-"));
  const serve = await Serve.start(target, { policies: { all: `version: 1\nname: all\n${DRAFTERS}holdback: { start: 0.0, floor: 0.0 }\n` }, spare: false });
  try {
    // The first requests measure the costs of this server. The benchmark's prompts are others.
    for (const name of MEASURED) for (const entry of prompts[name].slice(-10)) await serve.ask(entry);
    const report = join(folder, "report.html");
    execFileSync(FORETELL, ["bench", "--direct", `http://${target.address}`, "--through", `http://127.0.0.1:${serve.port}`,
      "--metrics-direct", `http://${target.address}/metrics`, "--metrics-through", `${serve.url}/metrics`,
      "--workload", ...MEASURED.map((name) => `tests/workloads/${name}.jsonl`), "--alternations", String(ALTERNATIONS),
      "--max-tokens", "32", "--html", report], { cwd: ROOT, stdio: ["ignore", "ignore", "inherit"] });
    const { page, context, wrong } = await open(browser, pathToFileURL(report).href, VIEW);
    await picture(page, "table >> nth=0", "bench-report.png");
    complain(wrong);
    await context.close();
  } finally {
    await serve.end();
    rmSync(folder, { recursive: true, force: true });
  }
}

/** The hash of a file without its blank lines and lines of comment. */
function hash(file) {
  const lines = readFileSync(join(ROOT, file), "utf8").split("\n").filter((line) => !/^\s*(\/\/.*)?$/.test(line));
  return createHash("sha256").update(lines.join("\n")).digest("hex");
}

/** The files of `DEPENDS_ON` with their hashes. */
function sources() {
  const files = execFileSync("git", ["ls-files", "-z", "--", ...DEPENDS_ON], { cwd: ROOT, encoding: "utf8" }).split("\0").filter(Boolean).sort();
  return Object.fromEntries(files.map((file) => [file, hash(file)]));
}

const browser = await launch();
const target = await startTarget(PACE);
try {
  await statusPage(browser, target);
  await benchReport(browser, target);
} finally {
  await target.end();
  await browser.close();
}
const bytes = ["status-page.png", "bench-report.png"].map((name) => statSync(join(IMAGES, name)).size);
if (bytes[0] + bytes[1] > MAX_BYTES) throw new Error(`the pictures have ${bytes.join(" + ")} bytes, more than ${MAX_BYTES}`);
writeFileSync(join(IMAGES, "pictures.json"), `${JSON.stringify({ depends_on: DEPENDS_ON, sha256: sources() }, null, 2)}\n`);
