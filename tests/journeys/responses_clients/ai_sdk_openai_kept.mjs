// The AI SDK as it is: it takes every answer for stored, and names earlier items by their ids.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const sent = [];
const watched = (url, init) => (sent.push(JSON.parse(init.body)), fetch(url, init));
const openai = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.TOKEN, fetch: watched });
const short = { model: openai(process.env.MODEL), maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
const messages = [{ role: "user", content: "Hello, how are you?" }];
const first = await generateText({ ...short, messages });
messages.push(...first.response.messages, { role: "user", content: "And why?" });
const second = streamText({ ...short, messages });
const text = await second.text;
messages.push(...(await second.response).messages, { role: "user", content: "Go on." });
const third = await generateText({ ...short, messages });
const named = sent.flatMap((body) => body.input.filter((item) => item.type === "item_reference")).length;
const look_up = tool({
  description: "Looks a city up.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async () => "The capital of France.",
});
const loop = streamText({ ...short, prompt: "Please look up Paris.", tools: { look_up }, stopWhen: stepCountIs(3) });
const after = await loop.text;
console.log(JSON.stringify({ first: first.text, second: text, third: third.text, named, after }));
