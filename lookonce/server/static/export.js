// A kept conversation as a file: Markdown for people, or the messages of a chat request.

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

async function contentOf(question, attachments) {
  return [...await Promise.all(attachments.map((item) => item.part())), { type: "text", text: question }];
}
