// The AI SDK, whose OpenAI provider speaks Responses by default.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.TOKEN });
const model = openai(process.env.MODEL);
// Without it the SDK refers to earlier items by their ids, as it takes every answer for stored.
const providerOptions = { openai: { store: false } };
const short = { model, maxOutputTokens: 24, temperature: 0, maxRetries: 0, providerOptions };
const answer = await generateText({ ...short, prompt: "Hello, how are you?", system: "Be short." });
let streamed = 0;
for await (const _ of streamText({ ...short, prompt: "Hello, how are you?" }).textStream) streamed += 1;
const held = await generateObject({
  ...short,
  maxOutputTokens: 400,
  schema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  prompt: "Which city?",
});
const called = [];
const look_up = tool({
  description: "Looks a city up.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    called.push(city);
    return "The capital of France.";
  },
});
const loop = streamText({ ...short, prompt: "Please look up Paris.", tools: { look_up }, stopWhen: stepCountIs(3) });
const after = await loop.text;
console.log(JSON.stringify({ answer: answer.text, streamed, city: held.object.city, called, after }));
