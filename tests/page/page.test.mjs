// The status page in a headless Chromium, before a proxy with the bundled models and some load.

import assert from "node:assert/strict";
import { rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";

import { launch, open } from "./browser.mjs";
import { contrasts, fits, text } from "./looks.mjs";
import { PATIENCE, Serve, startTarget, until, workload } from "./proxy.mjs";

const HOSTILE = `<img src=x onerror="alert(1)">'"&amp;</td><script>alert(2)</script>`;
const SECTIONS = ["helping", "wrong", "time", "why", "coverage", "drafts", "replicas", "policies", "sessions", "switches"];

let target;
let browser;
let serve;

before(async () => {
  // One after the other: a process that is started beside a failure keeps the tests from ending.
  browser = await launch();
  target = await startTarget();
  console.log(`Chromium ${browser.version()}`);
  serve = await Serve.start(target);
  const load = serve.load(3);
  await until("both groups compared, rounds, a sample", async () => {
    const status = await serve.api("/api/status");
    const compared = status.compared.flatMap(({ backends }) => backends);
    return compared.some((entry) => entry.time_per_token_ratio !== null)
      && status.compared.find(({ policy }) => policy === "watched").backends.some((entry) => entry.projected_speedup !== null)
      && status.since_start.drafters.some((each) => each.drafter === "model")
      && status.samples.some((sample) => sample.rounds > 0 && sample.tolerance !== null);
  }, 5 * PATIENCE);
  const messages = [{ role: "user", content: "hello" }];
  await serve.ask({ route: "chat", body: { model: HOSTILE, messages } });
  const tools = [{ type: "function", function: { name: "f", parameters: {} } }];
  await serve.ask({ route: "chat", body: { model: "foretell-target", messages, tools } });
  await load.stop();
  assert.deepEqual(load.failures, []);
});

after(async () => {
  await browser?.close();
  await serve?.end();
  await target?.end();
});

/** A page that has shown its first answers. */
async function shown(options) {
  const opened = await open(browser, `${serve.url}/`, options);
  await opened.page.locator("#session-list button").first().waitFor();
  return opened;
}

/** Resolves once the page has taken an answer that it asked for after this call. */
async function refreshed(page) {
  await page.waitForResponse((answer) => answer.url().includes("/api/status"));
  await page.waitForResponse((answer) => answer.url().includes("/api/status"));
}

describe("what it shows", () => {
  test("every section has figures, and nothing goes wrong", async () => {
    const { page, context, wrong } = await shown();
    for (const id of SECTIONS) {
      assert.ok((await text(page, `#${id}`)).length > 20, id);
    }
    assert.match(await text(page, "#summary"), /as fast as the control group/);
    assert.match(await text(page, "#groups"), /projected: \d/);
    assert.match(await text(page, "#tiles"), /tokens\/s/);
    assert.match(await text(page, "#problems"), /Replica spare\/0 at http:\S+ is down: .*refused/);
    assert.match(await text(page, "#reasons"), /in the control group, which is decoded plainly · control_group.*\d+ \(\d/s);
    assert.match(await text(page, "#reasons"), /the server parses tool calls, and no parser for them is configured here \(docs\/agents\.md\) · tools/);
    assert.match(await text(page, "#gates"), /closed/);
    assert.match(await text(page, "#gates-why"), /health at spare\/0: the replica is down or disabled, or its circuit breaker is open \(.*ide-code.*\)/);
    assert.match(await text(page, "#drafters"), /prompt lookup.*model|model.*prompt lookup/s);
    assert.match(await text(page, "#replica-list"), /target\/0\s*ready\s*closed\s*onnx/);
    assert.match(await text(page, "#replica-list"), /a plain token [\d.]+ (ms|µs)/);
    assert.match(await text(page, "#policy-list"), /ide-code\s*[0-9a-f]{8}\s*auto\s*yes/);
    assert.ok(await page.locator("#places svg.by-place rect.bar").count() > 4);
    const drawn = await page.locator("#plots path.line").evaluateAll((lines) => lines.map((line) => line.getAttribute("d") ?? ""));
    assert.equal(drawn.length, 6);
    for (const line of drawn) assert.match(line, /^M\d/, "each plot has a line");
    assert.deepEqual(wrong, []);
    await context.close();
  });

  test("the figures are those of the API", async () => {
    const { page, context } = await shown();
    await page.getByRole("button", { name: "since start" }).click();
    const { since_start: sums } = await serve.api("/api/status");
    const count = new Intl.NumberFormat("en").format(sums.completions);
    assert.ok((await text(page, "#tiles")).includes(`${count} completions`));
    for (const { reason, requests } of sums.reasons) {
      assert.match(await text(page, `#reasons li:has-text("· ${reason}")`), new RegExp(`${requests} \\(`));
    }
    const drawn = await page.locator("#drafters tbody tr").allInnerTexts();
    assert.equal(drawn.length, sums.drafters.length);
    assert.equal(await page.locator("#conditions .heat").count(), sums.conditions.length);
    const { drafted, rounds } = sums.conditions[0];
    assert.ok(Math.abs(parseFloat(await text(page, "#conditions .heat")) - drafted / rounds) < 0.06);
    const report = await serve.api("/api/coverage");
    assert.equal(await text(page, "#coverage-told"), `${report.sentence}.`);
    assert.match(report.sentence, /of your output tokens are eligible/);
    const covered = await page.locator("#covered tbody tr").allInnerTexts();
    assert.equal(covered.length, Math.min(report.rows.length, 12));
    const { path, route, tokens } = report.rows[0];
    for (const wanted of [path, route, new Intl.NumberFormat("en").format(tokens)]) {
      assert.ok(covered[0].includes(wanted), `${wanted} in ${covered[0]}`);
    }
    await context.close();
  });

  test("what a client names is text and never markup", async () => {
    const { page, context, wrong } = await shown();
    const cell = page.locator("#session-list td", { hasText: "<img src=x" }).first();
    assert.equal(await cell.textContent(), HOSTILE);
    await cell.click();
    await page.locator("#session dd", { hasText: "<img src=x" }).waitFor();
    assert.equal(await page.locator("img, td script, dd script").count(), 0);
    assert.deepEqual(wrong, []);
    await context.close();
  });

  test("sessions are filtered by path, reason and policy", async () => {
    const { page, context } = await shown();
    const { sessions } = await serve.api("/api/sessions?rounds=no");
    const rows = page.locator("#session-list tbody tr:not([data-key=nothing])");
    const asks = { path: (each) => each.path, reason: (each) => each.reason ?? "none", policy: (each) => each.policy ?? "none" };
    for (const [filter, of] of Object.entries(asks)) {
      const wanted = of(sessions[0]);
      await page.locator(`#filter-${filter}`).selectOption(wanted);
      assert.equal(await rows.count(), sessions.filter((each) => of(each) === wanted).length, filter);
      await page.locator(`#filter-${filter}`).selectOption("");
    }
    assert.equal(await rows.count(), sessions.length);
    await context.close();
  });

  test("a page that is not seen asks for nothing, and asks again once it is seen", async () => {
    const { page, context } = await shown();
    await page.clock.install();
    const hide = (hidden) => page.evaluate((value) => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => value });
      document.dispatchEvent(new Event("visibilitychange"));
    }, hidden);
    await refreshed(page);
    await hide(true);
    // Every look begins with the status. One that had begun before the page was hidden may still ask for the rest.
    const begun = [];
    page.on("request", (request) => request.url().includes("/api/status") && begun.push(request.url()));
    await page.clock.runFor(120_000);
    assert.deepEqual(begun, []);
    const again = page.waitForResponse((answer) => answer.url().includes("/api/status"));
    await hide(false);
    await again;
    await context.close();
  });
});

describe("how it looks", () => {
  for (const colorScheme of ["light", "dark"]) {
    test(`text has a contrast of at least 4.5 (${colorScheme})`, async () => {
      const { page, context } = await shown({ colorScheme });
      await page.locator("#session-list button").first().click();
      await page.locator("#session h3").waitFor();
      await page.locator("#drain-form button").click();
      const low = await contrasts(page);
      assert.ok(low.seen > 200, `${low.seen} texts`);
      assert.deepEqual(low.below, []);
      await context.close();
    });
  }

  test("a phone shows it without scrolling sideways", async () => {
    const { page, context } = await shown({ viewport: { width: 360, height: 740 } });
    assert.deepEqual(await fits(page), []);
    await page.locator("#session-list tr.chosen, #session-list tbody tr:has-text('speculated')").first().click();
    await page.locator("#rounds").waitFor();
    assert.deepEqual(await fits(page), []);
    await page.locator("#mode-form button").click();
    await page.locator("#confirm").waitFor();
    assert.deepEqual(await fits(page), []);
    await context.close();
  });

  test("nothing moves while figures are refreshed", async () => {
    const { page, context } = await shown();
    await refreshed(page);
    await page.evaluate(() => {
      window.shifts = [];
      const told = ({ value, sources }) => `${value}: ${sources.map(({ node }) => node?.id || node?.textContent?.slice(0, 40)).join(", ")}`;
      new PerformanceObserver((entries) => window.shifts.push(...entries.getEntries().map(told))).observe({ type: "layout-shift" });
    });
    for (let look = 0; look < 2; look += 1) await refreshed(page);
    assert.deepEqual(await page.evaluate(() => window.shifts), []);
    await context.close();
  });

  test("whoever wants no motion gets none", async () => {
    const { page, context } = await shown({ reducedMotion: "reduce" });
    const moving = await page.evaluate(() => [...document.querySelectorAll("*")]
      .filter((node) => getComputedStyle(node).transitionDuration !== "0s" || getComputedStyle(node).animationName !== "none").length);
    assert.equal(moving, 0);
    await context.close();
  });
});

describe("by keyboard alone", () => {
  const focused = (page) => page.evaluate(() => ({
    tag: document.activeElement.tagName, text: document.activeElement.textContent.trim(), id: document.activeElement.id,
    label: document.activeElement.getAttribute("aria-label"),
    outline: getComputedStyle(document.activeElement).outlineStyle,
  }));

  test("from the top to the rounds of a session, and back", async () => {
    const { page, context, wrong } = await shown();
    await page.keyboard.press("Tab");
    assert.equal((await focused(page)).text, "Skip to the figures");
    await page.keyboard.press("Enter");
    let at;
    const tabs = async (what, holds) => {
      for (let step = 0; step < 200; step += 1) {
        await page.keyboard.press("Tab");
        at = await focused(page);
        assert.notEqual(at.outline, "none", `the focus shows on ${at.tag} ${at.id} ${at.text}`);
        if (holds(at)) return;
      }
      assert.fail(`no ${what} within 200 steps, last ${JSON.stringify(at)}`);
    };
    await tabs("filter", ({ id }) => id === "filter-path");
    await page.keyboard.type("speculated");
    await tabs("session", ({ label }) => label?.startsWith("Rounds of session"));
    const opened = at.label;
    await page.keyboard.press("Enter");
    await page.locator("#rounds tbody tr").first().waitFor();
    const number = /session (\d+)/.exec(opened)[1];
    assert.equal((await focused(page)).text, `Session ${number}`);
    const session = await serve.api(`/api/sessions/${number}`);
    const rows = await page.locator("#rounds tbody tr").allInnerTexts();
    assert.equal(rows.length, session.rounds.length);
    session.rounds.forEach((round, place) => {
      const [, drafter, drafted, accepted, rejected] = rows[place].split(/\s+/);
      assert.deepEqual([drafter, drafted, accepted, rejected],
        [round.drafter, round.drafted, round.accepted, round.drafted - round.accepted].map(String));
    });
    await tabs("way back", ({ text }) => text === "Close");
    await page.keyboard.press("Enter");
    assert.ok((await focused(page)).label.startsWith(`Rounds of session ${number}`), "the focus is back");
    assert.deepEqual(wrong, []);
    await context.close();
  });

  test("a refresh does not take the focus away", async () => {
    const { page, context } = await shown();
    await serve.ask(workload("completion")[0]);
    const { sessions: number } = await serve.api("/api/status");
    const button = page.locator(`#session-list tr[data-key="${number}"] button`);
    await button.focus();
    const label = await button.getAttribute("aria-label");
    await until("the row is brought up to date", async () => await button.getAttribute("aria-label") !== label);
    assert.equal((await focused(page)).label, await button.getAttribute("aria-label"));
    await context.close();
  });

  test("a plot is read by arrow keys", async () => {
    const { page, context } = await shown();
    const frame = page.locator("#plots .frame").first();
    await frame.focus();
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("ArrowLeft");
    assert.match(await frame.getAttribute("aria-label"), /, at \d\d:\d\d:\d\d$/);
    await context.close();
  });

  test("the mode is switched after a question, for a time, and said aloud", async () => {
    const { page, context, wrong } = await shown();
    await page.locator("#mode-wanted").focus();
    await page.keyboard.type("observe");
    await page.locator("#mode-ttl").selectOption("15m");
    await page.locator("#mode-form button").focus();
    await page.keyboard.press("Enter");
    await page.locator("#confirm").waitFor();
    assert.equal((await serve.api("/api/status")).mode.process.mode, "auto", "it asks first");
    assert.match(await text(page, "#confirm-title"), /whole process to observe, for 15 minutes/);
    await page.keyboard.press("Escape");
    await page.locator("#mode-form button").focus();
    await page.keyboard.press("Enter");
    await page.locator("#confirm-yes").focus();
    await page.keyboard.press("Enter");
    await page.locator("#said", { hasText: "Mode observe set" }).waitFor();
    assert.equal(await page.locator("#said").getAttribute("aria-live"), "polite");
    const { process } = (await serve.api("/api/status")).mode;
    assert.deepEqual([process.mode, process.base], ["observe", "auto"]);
    assert.ok(process.ends_in_seconds > 800);
    await page.locator("#mode", { hasText: "mode observe, for 1" }).waitFor();
    assert.match(await text(page, "#problems"), /Mode observe: no request is speculated on/);
    assert.match(await text(page, "#summary"), /Mode observe: no request is speculated on/);
    await page.locator("#mode-wanted").selectOption("off");
    await page.locator("#mode-backend").selectOption("target");
    await page.locator("#mode-ttl").selectOption("");
    await page.locator("#mode-form button").click();
    await page.locator("#confirm-yes").click();
    await page.locator("#said", { hasText: "Mode off set for backend target" }).waitFor();
    const { backends } = (await serve.api("/api/status")).mode;
    assert.deepEqual(backends.map(({ mode }) => mode), ["off", "observe"]);
    await page.locator("#problems", { hasText: "Mode off at backend target" }).waitFor();
    for (const backend of ["target", ""]) {
      await page.locator("#mode-wanted").selectOption("auto");
      await page.locator("#mode-backend").selectOption(backend);
      await page.locator("#mode-form button").click();
      await page.locator("#confirm-yes").click();
      await page.locator("#said", { hasText: `Mode auto set for ${backend === "" ? "the whole process" : `backend ${backend}`}` }).waitFor();
    }
    assert.equal((await serve.api("/api/status")).mode.process.mode, "auto");
    assert.deepEqual(wrong, []);
    await context.close();
  });
});

describe("what may go wrong", () => {
  test("policies that are refused are listed with their place, and then taken", async () => {
    const { page, context, wrong } = await shown();
    const file = join(serve.policies, "z.yaml");
    const reload = async () => {
      await page.locator("#reload-form button").click();
      await page.locator("#confirm-yes").click();
    };
    writeFileSync(file, "version: 1\nname: z\ngamma: { max: 99 }\n");
    await reload();
    await page.locator("#reload-errors", { hasText: `z.yaml:3: gamma.max: out of range` }).waitFor();
    assert.match(await text(page, "#said"), /refused/);
    await page.locator("#problems", { hasText: "not in force" }).waitFor();
    await page.locator("#policy-list", { hasText: "the files were refused" }).waitFor();
    await page.locator("#state", { hasText: "files are not in force" }).waitFor();
    assert.match(await page.title(), /files are not in force – Foretell$/);
    rmSync(file);
    await reload();
    await page.locator("#said", { hasText: "Loaded: " }).waitFor();
    await page.locator("#policy-list", { hasText: "yes" }).waitFor();
    assert.equal(await page.locator("#reload-errors li").count(), 0);
    // The browser itself reports the answer 422.
    assert.deepEqual(wrong.filter((line) => !line.includes("422")), []);
    await context.close();
  });

  test("an outage is said at the top and in the title, and no answer stands above it", async () => {
    const gone = await startTarget();
    const own = await Serve.start(gone, { spare: false });
    const { page, context } = await open(browser, `${own.url}/`);
    await own.ask(workload("completion")[0]);
    await page.locator("#state", { hasText: /^ready$/ }).waitFor();
    assert.equal(await page.title(), "Foretell");
    await gone.end();
    await own.ask(workload("completion")[0]).catch(() => null);
    await page.locator("#state", { hasText: "outage: target" }).waitFor();
    assert.equal(await page.title(), "outage: target – Foretell");
    assert.equal(await text(page, "#summary-word"), "Outage.");
    assert.match(await text(page, "#summary"), /^No replica of backend target answers\.$/);
    assert.match(await text(page, "#problems"), /Outage: no replica of backend target answers/);
    await context.close();
    await own.end();
  });

  test("a server that is gone is said, and a new one is taken up", async () => {
    const own = await Serve.start(target, { spare: false });
    const { page, context, wrong } = await open(browser, `${own.url}/`);
    await page.locator("#summary", { hasText: "No completion yet." }).waitFor();
    assert.match(await text(page, "#sessions"), /No completion yet/);
    assert.match(await text(page, "#drafts"), /No round yet/);
    assert.match(await text(page, "#problems"), /No known problems/);
    await own.ask(workload("completion")[0]);
    await page.locator("#session-list button").first().waitFor();
    await own.kill();
    await page.locator("#stale", { hasText: "No answer from Foretell: the process cannot be reached. The data shown is of" }).waitFor();
    assert.equal(await page.locator("#session-list button").count(), 1, "what was shown stays");
    await own.run();
    await page.locator("#stale").waitFor({ state: "hidden" });
    await page.locator("#session-list", { hasText: "No completion yet." }).waitFor();
    assert.deepEqual(wrong.filter((line) => !/Failed to load resource|ERR_/.test(line)), []);
    await context.close();
    await own.end();
  });

  test("a token is asked for, kept in the tab alone, and used for switches", async () => {
    const own = await Serve.start(target, { token: "s3cret-t0ken", spare: false });
    const { page, context, wrong } = await open(browser, `${own.url}/`);
    const give = async (token) => {
      await page.locator("#token-typed").fill(token);
      await page.keyboard.press("Enter");
    };
    await page.locator("#token-typed").waitFor();
    assert.match(await text(page, "#stale"), /token is missing/);
    await give("wrong");
    await until("asked again", async () => await page.locator("#token-typed").inputValue() === "" && page.locator("#token").isVisible());
    await give("s3cret-t0ken");
    await page.locator("#summary", { hasText: "No completion yet." }).waitFor();
    assert.equal(await page.locator("#stale").isHidden(), true);
    await page.locator("#mode-wanted").selectOption("off");
    await page.locator("#mode-form button").click();
    await page.locator("#confirm-yes").click();
    await page.locator("#said", { hasText: "Mode off set" }).waitFor();
    assert.equal((await own.api("/api/status")).mode.process.mode, "off");
    const kept = await page.evaluate(() => [document.cookie, localStorage.length, location.href, document.documentElement.outerHTML].join(" "));
    assert.ok(!kept.includes("s3cret"), "not in cookies, address or markup");
    const other = await open(browser, `${own.url}/`);
    await other.page.locator("#token-typed").waitFor();
    assert.deepEqual(wrong.filter((line) => !line.includes("401")), []);
    await other.context.close();
    await context.close();
    await own.end();
  });

  test("a drain wants its word, and ends the process", async () => {
    const own = await Serve.start(target, { spare: false });
    const { page, context } = await open(browser, `${own.url}/`);
    await page.locator("#summary", { hasText: "No completion yet." }).waitFor();
    await page.locator("#drain-form button").click();
    const yes = page.locator("#confirm-yes");
    assert.equal(await yes.isDisabled(), true);
    await page.locator("#confirm-typed").fill("drai");
    await page.keyboard.press("Enter");
    assert.equal((await own.api("/api/status")).draining, false);
    await page.locator("#confirm-typed").fill("drain");
    await yes.click();
    await own.child.gone;
    assert.equal(own.child.process.exitCode, 0);
    await page.locator("#stale", { hasText: "No answer from Foretell" }).waitFor();
    await context.close();
    await own.end();
  });
});
