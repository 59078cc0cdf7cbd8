// What was said so far, and one question's way to its answer.
//
// A conversation is a list of turns. A turn is a question with what was attached to it, and its answers: one,
// or several where tools were called in between.

import { chat } from "./api.js";

const TITLE = 60; // characters

function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The messages of a chat request. A call that nobody answered has an empty result. */
export function messagesOf(turns) {
  return turns.flatMap(({ message, answers }) => [message, ...answers.flatMap(answerMessages)]);
}

function answerMessages({ text, calls }) {
  if (!calls.length) return [{ role: "assistant", content: text }];
  const made = calls.map(({ id, name, written }) => ({ id, type: "function", function: { name, arguments: written } }));
  return [
    { role: "assistant", content: text, tool_calls: made },
    ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" })),
  ];
}

export class Conversation {
  constructor({ id = newId(), title = "", named = false, created = Date.now(), turns = [] } = {}) {
    Object.assign(this, { id, title, named, created, turns });
  }

  /** As `Store` keeps it. */
  record() {
    const turns = this.turns.map(({ question, attachments, answers }) => ({
      question, answers, attachments: attachments.map(({ name, kind, file }) => ({ name, kind, file })),
    }));
    return { id: this.id, title: this.title, named: this.named, created: this.created, updated: Date.now(), turns };
  }

  /** Everything attached so far, in the order of the prompt. */
  attachments() {
    return this.turns.flatMap((turn) => turn.attachments);
  }

  /** Takes away a turn and all after it; answers them. */
  cutFrom(turn) {
    const index = this.turns.indexOf(turn);
    return index < 0 ? [] : this.turns.splice(index);
  }

  /**
   * Asks, and tells `view` what comes: text(piece), thinking(piece), called(calls), ended(facts).
   * A turn stays in the conversation once some of its answer is there, stopped or not; without any, the turns
   * that it stands for (`instead`, cut from the end) come back.
   */
  async ask(turn, request, instead = []) {
    turn.answers = [];
    this.turns.push(turn);
    this.title ||= (turn.question || turn.attachments[0]?.name || "Chat").replace(/\s+/g, " ").slice(0, TITLE);
    try {
      await this.answer(turn, request);
    } catch (error) {
      if (!turn.answers.length) this.turns = [...this.turns.filter((other) => other !== turn), ...instead];
      throw error;
    }
  }

  /** Answers the last turn once more; what it answered before comes back where nothing new is said. */
  async retry(turn, request) {
    const before = turn.answers.splice(0);
    try {
      await this.answer(turn, request);
    } catch (error) {
      if (!turn.answers.length) turn.answers = before;
      throw error;
    }
  }

  /** The next answer of a turn: its first, or the one after the results of its calls. */
  async answer(turn, { model, settings, signal, view }) {
    for (const each of this.turns) each.message ??= await messageOf(each);
    const body = {
      model, messages: [...settings.systemMessages, ...messagesOf(this.turns)], ...settings.fields,
      stream: true, stream_options: { include_usage: true }, reuse_receipt: true,
    };
    const answer = { text: "", thinking: "", calls: [], facts: null, stopped: false, json: settings.asksJson };
    try {
      await stream(body, answer, turn, { key: settings.key, signal, view });
    } catch (error) {
      answer.stopped = true;
      throw error;
    } finally {
      if (answer.calls.length) view.called(answer);
    }
  }
}

async function messageOf({ question, attachments }) {
  const content = await Promise.all(attachments.map((item) => item.part()));
  content.push({ type: "text", text: question });
  return { role: "user", content };
}

async function stream(body, answer, turn, { key, signal, view }) {
  const start = performance.now();
  const timing = { first: null, whole: null };
  const begun = () => {
    if (timing.first !== null) return;
    timing.first = performance.now() - start;
    turn.answers.push(answer);
  };
  for await (const chunk of chat(body, { key, signal })) {
    const { content, reasoning_content: thought, tool_calls: calls } = chunk.choices[0]?.delta ?? {};
    if (thought) {
      begun();
      answer.thinking += thought;
      view.thinking(thought);
    }
    if (content) {
      begun();
      answer.text += content;
      view.text(content, answer);
    }
    for (const piece of calls ?? []) {
      begun();
      takeCall(answer.calls, piece);
    }
    if (chunk.usage) {
      begun();
      timing.whole = performance.now() - start;
      answer.facts = { receipt: chunk.reuse_receipt, usage: chunk.usage, timing };
      view.ended(answer.facts);
    }
  }
}

function takeCall(calls, { index, id, function: said = {} }) {
  calls[index] ??= { id: "", name: "", written: "", result: null };
  calls[index].id ||= id ?? "";
  calls[index].name += said.name ?? "";
  calls[index].written += said.arguments ?? "";
}
