// A headless Chromium and pages in it that note everything that goes wrong.

import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { extname, join } from "node:path";

import { PATIENCE, ROOT } from "./proxy.mjs";

const CACHE = join(process.env.FORETELL_CACHE ?? join(ROOT, ".cache"), "page");

function playwright() {
  try {
    return createRequire(join(CACHE, "package.json"))("playwright-core");
  } catch (error) {
    throw new Error(`playwright-core is not in ${CACHE}: run tests/page/fetch.sh (${error.code})`);
  }
}

function executable() {
  const named = ["chromium", "chromium-browser", "google-chrome"].map((name) => {
    try {
      return execFileSync("sh", ["-c", `command -v ${name}`], { encoding: "utf8" }).trim();
    } catch {
      return null;
    }
  });
  const found = [process.env.CHROMIUM, ...named, join(CACHE, "debian/usr/bin/chromium")].find((path) => path && existsSync(path));
  if (found === undefined) throw new Error("no Chromium: run tests/page/fetch.sh, or set CHROMIUM to its path");
  return found;
}

export async function launch() {
  const path = executable();
  const beside = join(CACHE, "debian/usr/lib/x86_64-linux-gnu");
  const env = existsSync(beside) ? { ...process.env, LD_LIBRARY_PATH: beside } : process.env;
  return playwright().chromium.launch({ executablePath: path, env, args: ["--no-sandbox", "--disable-gpu"] });
}

const PAGE = join(ROOT, "src/foretell/admin/page");
const TYPES = { ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8" };

/** Serves the page's files from the source tree instead of those that were built into the program. */
export async function serveFromTree(context) {
  for (const file of readdirSync(PAGE)) {
    const path = file === "index.html" ? "/" : `/${file}`;
    await context.route((url) => url.pathname === path, (route) =>
      route.fulfill({ body: readFileSync(join(PAGE, file)), contentType: TYPES[extname(file)] }));
  }
}

/** A page of a context of its own; `wrong` collects errors of the console, of scripts and of the policy.
 * FORETELL_PAGE=tree: see `serveFromTree`. */
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(PATIENCE);
  if (process.env.FORETELL_PAGE === "tree") await serveFromTree(context);
  const page = await context.newPage();
  const wrong = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) wrong.push(`${message.type()}: ${message.text()}`);
  });
  page.on("pageerror", (error) => wrong.push(`script: ${error.message}`));
  page.on("dialog", (dialog) => {
    wrong.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  await context.exposeBinding("noteViolation", (_, text) => wrong.push(text));
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (event) =>
      window.noteViolation(`policy: ${event.violatedDirective} ${event.blockedURI}`));
  });
  await page.goto(url);
  return { page, context, wrong };
}
