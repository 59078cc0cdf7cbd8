// What was said so far, and one question's way to its answer.

import { chat } from "./api.js";

export class Conversation {
  constructor() {
    this.clear();
  }

  clear() {
    this.turns = [];
  }

  /** Everything attached so far, in the order of the prompt. */
  attachments() {
    return this.turns.flatMap((turn) => turn.attachments);
  }

  /**
   * Asks, and tells `view` what comes: text(piece), ended({receipt, usage, timing}).
   * A turn stays in the conversation once some of its answer is there, stopped or not.
   */
  async ask(turn, { model, settings, signal, view }) {
    const content = await Promise.all(turn.attachments.map((item) => item.part()));
    content.push({ type: "text", text: turn.question });
    turn.message = { role: "user", content };
    this.turns.push(turn);
    try {
      await this.#stream(turn, { model, settings, signal, view });
    } catch (error) {
      if (!turn.answer) this.turns = this.turns.filter((other) => other !== turn);
      throw error;
    }
  }

  async #stream(turn, { model, settings, signal, view }) {
    const body = {
      model, messages: this.#messages(), temperature: settings.temperature, max_tokens: settings.maxTokens,
      stream: true, stream_options: { include_usage: true }, reuse_receipt: true,
    };
    const start = performance.now();
    const timing = { first: null, whole: null };
    turn.answer = "";
    for await (const chunk of chat(body, { key: settings.key, signal })) {
      const piece = chunk.choices[0]?.delta.content;
      if (piece) {
        timing.first ??= performance.now() - start;
        turn.answer += piece;
        view.text(piece);
      }
      if (chunk.usage) {
        timing.whole = performance.now() - start;
        view.ended({ receipt: chunk.reuse_receipt, usage: chunk.usage, timing });
      }
    }
  }

  #messages() {
    return this.turns.flatMap((turn) => {
      const answered = turn.answer === undefined ? [] : [{ role: "assistant", content: turn.answer }];
      return [turn.message, ...answered];
    });
  }
}
