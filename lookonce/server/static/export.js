// A kept conversation as a file: Markdown for people, or the messages of a chat request, which can be opened again.

import { messagesOf } from "./conversation.js";
import { Attachment } from "./attachments.js";

export function asMarkdown({ title, turns }) {
  const parts = turns.flatMap(({ question, attachments, answers }) => [
    "## You", ...attachments.map(({ name }) => `*${name}*`), question,
    ...answers.flatMap(({ text, calls }) => ["## Model", text, ...calls.map(callText)]),
  ]);
  return `${[`# ${title}`, ...parts].filter(Boolean).join("\n\n")}\n`;
}

function callText({ name, written, result }) {
  return `\`${name}\`\n\n\`\`\`json\n${written}\n\`\`\`\n\n${result ?? ""}`;
}

/** With the bytes of what was attached, so that the messages can be sent again. */
export async function asJson({ title, created, turns }) {
  const whole = await Promise.all(turns.map(async (turn) => {
    const attachments = turn.attachments.map((kept) => new Attachment(kept.file, kept.kind));
    const content = await contentOf(turn.question, attachments);
    attachments.forEach((item) => item.forget());
    return { ...turn, message: { role: "user", content } };
  }));
  return JSON.stringify({ title, created: new Date(created).toISOString(), messages: messagesOf(whole) }, null, 2);
}

/** What `asJson` wrote, or any chat request: the title, the time and the turns of a conversation. */
export function fromJson(text) {
  const { title, created, messages } = parsed(text);
  if (!Array.isArray(messages)) throw new Error("This file has no messages of a conversation.");
  const turns = [];
  for (const message of messages) takeMessage(turns, message);
  if (!turns.length) throw new Error("This file has no question.");
  const named = typeof title === "string" && title ? title : turns[0].question || "Chat";
  return { title: named.slice(0, 120), created: Date.parse(created) || Date.now(), turns };
}

function parsed(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    throw new Error("This file is not JSON.");
  }
}

function takeMessage(turns, { role, content, tool_calls: calls, tool_call_id: answered }) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content ?? [];
  const text = parts.filter(({ type }) => type === "text").map((part) => part.text).join("\n");
  const last = turns.at(-1);
  if (role === "user") {
    const attachments = parts.filter(({ type }) => type !== "text").map(attachmentOf);
    turns.push({ question: text, attachments, answers: [] });
  } else if (role === "assistant" && last) {
    const made = (calls ?? []).map(({ id, function: said }) => ({ id, name: said.name, written: said.arguments, result: null }));
    last.answers.push({ text, thinking: "", calls: made, facts: null, stopped: false, json: false });
  } else if (role === "tool" && last) {
    const call = last.answers.flatMap(({ calls: made }) => made).find(({ id }) => id === answered);
    if (call) call.result = text;
  }
}

const KINDS = { image_url: "image", audio_url: "audio", video_url: "video", input_audio: "audio", file: "file" };

/** A part's bytes, which must stand in it. */
function attachmentOf(part) {
  const kind = KINDS[part.type];
  const held = part[part.type];
  const url = held?.url ?? held?.file_data ?? (held?.data && `data:audio/${held.format};base64,${held.data}`) ?? held;
  const [, type, coded] = /^data:([^;,]*);base64,(.*)$/s.exec(url) ?? [];
  if (!kind || coded === undefined) throw new Error("A file of this conversation is not in it, but elsewhere.");
  const bytes = Uint8Array.from(atob(coded), (character) => character.charCodeAt(0));
  const name = held.filename ?? `${kind}.${type.split("/").at(-1)}`;
  return { name, kind, file: new File([bytes], name, { type }) };
}

async function contentOf(question, attachments) {
  return [...await Promise.all(attachments.map((item) => item.part())), { type: "text", text: question }];
}
