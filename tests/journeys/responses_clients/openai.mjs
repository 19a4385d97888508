// OpenAI's package for JavaScript.
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.TOKEN, maxRetries: 0 });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const short = { model, max_output_tokens: 24, temperature: 0 };
const answer = await client.responses.create({ ...short, input: "Hello, how are you?", instructions: "Be short." });
let streamed = 0;
for await (const event of await client.responses.create({ ...short, input: "Hello, how are you?", stream: true })) {
  if (event.type === "response.output_text.delta") streamed += 1;
}
const held = await client.responses.parse({
  model,
  max_output_tokens: 400,
  temperature: 0,
  input: "Which city?",
  text: { format: { type: "json_schema", name: "city", schema, strict: true } },
});
const tools = [{ type: "function", name: "look_up", description: "Looks a city up.", parameters: schema, strict: true }];
const input = [{ role: "user", content: "Please look up Paris." }];
const called = [];
let after;
for (let turn = 0; turn < 3; turn += 1) {
  const stream = client.responses.stream({ ...short, input, tools });
  after = await stream.finalResponse();
  const calls = after.output.filter((item) => item.type === "function_call");
  if (!calls.length) break;
  input.push(...after.output);
  for (const call of calls) {
    called.push(JSON.parse(call.arguments).city);
    input.push({ type: "function_call_output", call_id: call.call_id, output: "The capital of France." });
  }
}
const { city } = JSON.parse(held.output_text);
console.log(JSON.stringify({ answer: answer.output_text, streamed, city, called, after: after.output_text }));
