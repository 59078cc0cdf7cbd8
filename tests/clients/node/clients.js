// One use of a client for Node.js: `node clients.js NAME URL IMAGE` prints what came, as JSON.

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [, , name, url, image] = process.argv;
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = createOpenAICompatible({ name: "lookonce", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("nano");
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const point = z.object({ x: z.number().int().min(0).max(9) });
const city = z.object({ city: z.enum(["Bern", "Rom"]) });
const seen = [
  { type: "text", text: "What shape is red?" },
  { type: "image_url", image_url: { url: `data:image/png;base64,${image}` } },
];
const weather = {
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { enum: ["Bern", "Rom"] } }, required: ["city"] } },
};

const uses = {
  "openai: picture": async () => {
    const answer = await openai.chat.completions.create({ model: "nano", messages: [{ role: "user", content: seen }] });
    return answer.choices[0].message.content;
  },
  "openai: stream": async () => {
    const stream = openai.chat.completions.stream({ model: "nano", messages: [{ role: "user", content: "Say apple." }] });
    return stream.finalContent();
  },
  "openai: parse": async () => {
    const answer = await openai.chat.completions.parse({
      model: "nano", max_tokens: 200, messages: [{ role: "user", content: "Say apple." }], response_format: zodResponseFormat(point, "point"),
    });
    return answer.choices[0].message.parsed;
  },
  "openai: tools": async () => {
    const answer = await openai.chat.completions.create({
      model: "nano", max_tokens: 200, messages: [{ role: "user", content: "Weather?" }], tools: [weather], tool_choice: "required", parallel_tool_calls: false,
    });
    const [call] = answer.choices[0].message.tool_calls;
    return { name: call.function.name, ...JSON.parse(call.function.arguments) };
  },
  "openai: responses": async () => {
    const first = await openai.responses.create({ model: "nano", input: "Say apple." });
    const next = await openai.responses.create({ model: "nano", input: "Say river.", previous_response_id: first.id });
    return [first.output_text, next.output_text];
  },
  "ai: picture": async () => {
    const content = [{ type: "text", text: "What shape is red?" }, { type: "image", image }];
    return (await generateText({ model, maxRetries: 0, messages: [{ role: "user", content }] })).text;
  },
  "ai: stream": async () => {
    let said = "";
    for await (const piece of streamText({ model, maxRetries: 0, prompt: "Say apple." }).textStream) said += piece;
    return said;
  },
  "ai: object": async () => (
    await generateObject({ model, maxRetries: 0, maxOutputTokens: 200, schema: point, prompt: "Say apple." })
  ).object,
  "ai: tools": async () => {
    const { toolCalls: [call] } = await generateText({
      model, maxRetries: 0, maxOutputTokens: 200, prompt: "Weather?", toolChoice: "required",
      tools: { get_weather: tool({ description: "The weather", inputSchema: city }) },
    });
    return { name: call.toolName, ...call.input };
  },
  "anthropic: picture": async () => {
    const source = { type: "base64", media_type: "image/png", data: image };
    const content = [{ type: "text", text: "What shape is red?" }, { type: "image", source }];
    const answer = await anthropic.messages.create({ model: "nano", max_tokens: 50, messages: [{ role: "user", content }] });
    return answer.content[0].text;
  },
  "anthropic: stream": async () => {
    const stream = anthropic.messages.stream({ model: "nano", max_tokens: 50, messages: [{ role: "user", content: "Say apple." }] });
    return stream.finalText();
  },
};

console.log(JSON.stringify(await uses[name]()));
