// A `foretell target` with the bundled models, a `foretell serve` before it, and clients that ask it.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

export const ROOT = resolve(import.meta.dirname, "../..");
export const FORETELL = process.env.FORETELL ?? join(ROOT, "target/release/foretell");
/** How long a condition may take to come true, milliseconds. */
export const PATIENCE = 60_000;
const PATHS = { completions: "/v1/completions", chat: "/v1/chat/completions" };

const LOOKUP = "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }";
const MODEL = "{ kind: model, model: draft-same, vocabulary: same }";
/** One policy for each thing that the page has to show. */
export const POLICIES = {
  "a-watched": `version: 1\nname: watched\nmode: shadow\nmatch: { headers: { x-team: [watched] } }\ndrafters: [${LOOKUP}]\n`,
  "b-relaxed": `version: 1\nname: relaxed\nmatch: { headers: { x-team: [relaxed] } }\ndrafters: [${LOOKUP}, ${MODEL}]\ngamma: { fixed: 4 }
accept: { rule: ears, kappa: 0.3, tolerance: { temperature: [[0.0, 0.0], [1.0, 0.3]], load: [[0.0, 0.5], [0.8, 1.0]], max: 0.3 } }\n`,
  "c-ide-code": `version: 1\nname: ide-code\ndrafters: [${LOOKUP}, ${MODEL}]\nholdback: { start: 0.4, floor: 0.3 }\n`,
};

/** A process that ends with the tests. */
class Child {
  constructor(argv, options = {}) {
    this.process = spawn(FORETELL, argv, { stdio: ["ignore", "pipe", "pipe"], ...options });
    this.process.on("error", (error) => { this.failed = error; });
    this.log = "";
    this.process.stderr.on("data", (data) => { this.log = (this.log + data).slice(-20_000); });
    this.gone = once(this.process, "exit");
  }

  async end(signal = "SIGTERM") {
    if (this.process.exitCode === null && this.process.signalCode === null) this.process.kill(signal);
    await this.gone;
  }
}

/** Resolves once `holds` gives something; fails after `patience` milliseconds. */
export async function until(what, holds, patience = PATIENCE) {
  const end = Date.now() + patience;
  for (;;) {
    const found = await holds();
    if (found) return found;
    if (Date.now() > end) throw new Error(`never: ${what}`);
    await new Promise((done) => setTimeout(done, 50));
  }
}

export async function freePort() {
  const server = createServer();
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

/** The bundled target, with the costs of a slower machine so that speculation pays. */
export async function startTarget(pace = "step=12ms,base=1.35,node=0.025") {
  const argv = ["target", "--model", join(ROOT, "onnx/models/target"), "--name", "foretell-target", "--listen", "127.0.0.1:0",
    "--device", "cpu", "--threads", "1", "--log-level", "error", "--pace", pace];
  const child = new Child(argv);
  for await (const line of createInterface(child.process.stdout)) {
    const ready = /ready on http:\/\/(\S+) /.exec(line);
    if (ready !== null) return Object.assign(child, { address: ready[1] });
  }
  throw new Error(`no target by ${FORETELL}: ${child.failed?.message ?? child.log}`);
}

/** A `foretell serve` in front of the target, and of a backend that is not there. */
export class Serve {
  static async start(target, { token, policies = POLICIES, spare = true } = {}) {
    const serve = new Serve();
    serve.folder = mkdtempSync(join(tmpdir(), "foretell-page-"));
    serve.policies = join(serve.folder, "policies");
    mkdirSync(serve.policies);
    for (const [name, text] of Object.entries(policies)) writeFileSync(join(serve.policies, `${name}.yaml`), text);
    serve.port = await freePort();
    serve.admin = await freePort();
    serve.token = token;
    if (token !== undefined) writeFileSync(join(serve.folder, "token"), `${token}\n`);
    writeFileSync(join(serve.folder, "foretell.yaml"), `version: 1
listen: [{ address: "127.0.0.1:${serve.port}" }]
admin: { address: "127.0.0.1:${serve.admin}"${token === undefined ? "" : `, token_file: ${join(serve.folder, "token")}`} }
backends:
  - { name: target, engine: onnx, replicas: ["http://${target.address}"], default: true, probe: { when: ready } }
${spare ? `  - { name: spare, engine: onnx, replicas: ["http://127.0.0.1:${await freePort()}"], models: [{ id: spare }] }\n` : ""}\
drafters: { draft-same: { path: ${join(ROOT, "onnx/models/draft-same")}, slots: 8, context: 2048 } }
policies: { dir: ${serve.policies} }
drain: { delay: 0s, grace: 1s }
observe: { log: text, level: warn }
`);
    await serve.run();
    return serve;
  }

  /** Starts the process; again after [`Self::kill`] on the same ports. */
  async run() {
    this.child = new Child(["serve", "--config", join(this.folder, "foretell.yaml")]);
    await until("ready", async () => {
      if (this.child.failed || this.child.process.exitCode !== null) {
        throw new Error(`no proxy by ${FORETELL}: ${this.child.failed?.message ?? this.child.log}`);
      }
      return (await fetch(`${this.url}/readyz`).catch(() => null))?.ok;
    });
  }

  get url() {
    return `http://127.0.0.1:${this.admin}`;
  }

  async api(path) {
    const headers = this.token === undefined ? {} : { authorization: `Bearer ${this.token}` };
    const answer = await fetch(this.url + path, { headers });
    return answer.json();
  }

  async ask({ route, body }, headers = {}) {
    const sent = { temperature: 0, ...body, max_tokens: Math.min(body.max_tokens ?? 48, 48), stream: true };
    const answer = await fetch(`http://127.0.0.1:${this.port}${PATHS[route]}`, {
      method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(sent),
    });
    await answer.text();
    return answer;
  }

  /** Clients that ask without a pause until `stop` is called. */
  load(clients) {
    const prompts = ["completion", "rewrite", "chat"].flatMap(workload);
    let over = false;
    const failures = [];
    const client = async (number) => {
      for (let asked = number; !over; asked += clients) {
        const team = { 5: "watched", 6: "relaxed", 7: "watched" }[asked % 8];
        const relaxed = team === "relaxed" ? { temperature: 0.8 } : {};
        const entry = prompts[asked % prompts.length];
        await this.ask({ ...entry, body: { ...entry.body, ...relaxed } }, team === undefined ? {} : { "x-team": team })
          .catch((error) => failures.push(error.message));
      }
    };
    const all = Promise.all(Array.from({ length: clients }, (_, number) => client(number)));
    return { failures, stop: () => { over = true; return all; } };
  }

  kill() {
    return this.child.end("SIGKILL");
  }

  async end() {
    await this.child.end();
    rmSync(this.folder, { recursive: true, force: true });
  }
}

export function workload(name) {
  const lines = readFileSync(join(ROOT, `tests/workloads/${name}.jsonl`), "utf8").split("\n");
  return lines.filter((line) => line.trim() !== "").map((line) => JSON.parse(line));
}
