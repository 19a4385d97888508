// An agent for Node with the package `openai`: a turn is two streamed calls, a tool in between.
// The package is found from BENCH_NODE_MODULES, the directory that holds it.
import http from "node:http";
import { createRequire } from "node:module";
import { randomBytes } from "node:crypto";
import path from "node:path";

const require = createRequire(path.join(process.env.BENCH_NODE_MODULES, "x.js"));
const { OpenAI } = require("openai");
const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY || "none",
  timeout: 300_000,
});
const model = process.env.HIVE_MODEL || "stub";
const tools = [
  {
    type: "function",
    function: {
      name: "look_up",
      description: "Looks a word up in the books.",
      parameters: { type: "object", properties: { word: { type: "string" } }, required: ["word"] },
    },
  },
];
let messages = [];
for (let size = 0; size < 200_000; size += 2000) {
  messages.push({ role: messages.length % 2 ? "assistant" : "user", content: randomBytes(1000).toString("hex") });
}
let turns = 0;

async function ask(sent) {
  let text = "";
  const calls = new Map();
  const stream = await client.chat.completions.create({ model, messages: sent, tools, stream: true });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      text += choice.delta.content || "";
      for (const call of choice.delta.tool_calls || []) {
        const found = calls.get(call.index) || { id: call.id, name: call.function.name, arguments: "" };
        found.arguments += call.function.arguments || "";
        calls.set(call.index, found);
      }
    }
  }
  return [text, [...calls.values()]];
}

async function turn() {
  turns += 1;
  messages = [...messages.slice(2), { role: "user", content: `Turn ${turns}: how much honey is there?` }];
  let sent = [{ role: "system", content: "You keep the books of an apiary." }, ...messages.slice(-3)];
  const [text, calls] = await ask(sent);
  if (!calls.length) throw new Error("the model called no tool");
  sent = [
    ...sent,
    {
      role: "assistant",
      content: text || null,
      tool_calls: calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } })),
    },
    ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: `frames of ${JSON.parse(call.arguments).word}: 2` })),
  ];
  const [answer] = await ask(sent);
  messages.push({ role: "assistant", content: answer });
  return { turn: turns, answer };
}

const server = http.createServer((request, response) => {
  const reply = (status, found) => {
    response.writeHead(status, { "Content-Type": "application/json", Connection: "close" });
    response.end(JSON.stringify(found));
  };
  request.resume();
  request.on("end", () => {
    if (request.method !== "POST" || request.url !== "/turn") return reply(200, { turn: turns });
    turn().then((found) => reply(200, found), (error) => reply(500, { error: String(error) }));
  });
});
server.listen(Number(process.env.HIVE_AGENT_PORT), "127.0.0.1");
