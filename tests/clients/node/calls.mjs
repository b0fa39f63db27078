// Calls of the official package `openai` for Node, as its users write them.
//
//     calls.mjs FOLDER URL MODEL
//
// FOLDER has the package in `node_modules`. Prints the names of the calls, makes each call whose
// name it reads, and prints what its user gets, errors included: one line of JSON each.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const [folder, url, model] = process.argv.slice(2);
const { OpenAI } = createRequire(join(folder, "package.json"))("openai");
const client = new OpenAI({ baseURL: url, apiKey: "key", maxRetries: 0 });

const ASK = "What is the capital of Switzerland? The capital of Switzerland is";
const messages = [
  { role: "system", content: "You answer in one sentence." },
  { role: "user", content: ASK },
];
const parameters = { type: "object", properties: { country: { type: "string" } }, required: ["country"] };
const described = { name: "capital", description: "Looks up the capital of a country.", parameters };
const tools = [{ type: "function", function: described }];
const called = { id: "c1", type: "function", function: { name: "capital", arguments: '{"country": "CH"}' } };
const history = [
  ...messages,
  { role: "assistant", content: null, tool_calls: [called] },
  { role: "tool", tool_call_id: "c1", content: "Bern" },
];
const thought = [
  messages[1],
  { role: "assistant", reasoning: "A city.", content: "Bern." },
  { role: "user", content: "Why?" },
];
const schema = { type: "json_schema", json_schema: { name: "c", schema: { type: "object" } } };

const asked = (more) => ({ model, messages, temperature: 0, max_tokens: 24, ...more });
const callOf = ({ function: { name, arguments: given } }) => [name, given];
const messageOf = ({ content, reasoning, tool_calls }) => ({ content, reasoning, calls: tool_calls?.map(callOf) });

/** The message of an answer that is not streamed. */
async function chat(more) {
  const answer = await client.chat.completions.create(asked(more));
  return { ...messageOf(answer.choices[0].message), finish: answer.choices[0].finish_reason };
}

/** The deltas of a stream, joined by hand. */
async function stream(more) {
  const joined = { content: "", reasoning: "", calls: [], finish: null, tokens: null };
  const events = await client.chat.completions.create(
    asked({ stream: true, stream_options: { include_usage: true }, ...more }),
  );
  for await (const { choices: [choice], usage } of events) {
    joined.tokens = usage?.completion_tokens ?? joined.tokens;
    joined.finish = choice?.finish_reason ?? joined.finish;
    joined.content += choice?.delta.content ?? "";
    joined.reasoning += choice?.delta.reasoning ?? "";
    for (const { index, function: part } of choice?.delta.tool_calls ?? []) {
      joined.calls[index] ??= ["", ""];
      joined.calls[index][0] += part.name ?? "";
      joined.calls[index][1] += part.arguments ?? "";
    }
  }
  return joined;
}

/** The message of a stream, joined by the package. */
async function joined(more) {
  const answer = await client.chat.completions.stream(asked(more)).finalChatCompletion();
  return { ...messageOf(answer.choices[0].message), finish: answer.choices[0].finish_reason };
}

/** The last message of a conversation whose tools the package calls. */
async function conversation(more) {
  const run = ({ country }) => `the capital of ${country}`;
  const tool = { type: "function", function: { ...described, function: run, parse: JSON.parse } };
  return messageOf(await client.chat.completions.runTools(asked({ tools: [tool], ...more })).finalMessage());
}

const CALLS = {
  chat: () => chat({}),
  stream: () => stream({}),
  "stream, joined by the package": () => joined({}),
  tools: () => chat({ tools }),
  "tools, streamed": () => stream({ tools }),
  "tools, joined by the package": () => joined({ tools }),
  "tools that the package calls": () => conversation({}),
  "tools that the package calls, streamed": () => conversation({ stream: true }),
  "tool results in the history": () => chat({ messages: history, tools }),
  "tool results in the history, streamed": () => stream({ messages: history, tools }),
  "reasoning in the history": () => chat({ messages: thought }),
  "reasoning in the history, streamed": () => stream({ messages: thought }),
  "an effort of reasoning": () => chat({ reasoning_effort: "low" }),
  "an effort of reasoning, streamed": () => stream({ reasoning_effort: "low", tools }),
  "a forced tool": () => chat({ tools, tool_choice: "required" }),
  json_schema: () => chat({ response_format: schema }),
  completion: async () =>
    (await client.completions.create({ model, prompt: ASK, max_tokens: 24, temperature: 0 })).choices[0].text,
  responses: async () =>
    (await client.responses.create({ model, input: ASK, temperature: 0, max_output_tokens: 24 })).output_text,
};

console.log(JSON.stringify(Object.keys(CALLS)));
for await (const name of createInterface({ input: process.stdin })) {
  let got;
  try {
    got = (await CALLS[name]()) ?? null;
  } catch (error) {
    got = { error: `${error.constructor.name}: ${error.message}` };
  }
  console.log(JSON.stringify(got));
}
