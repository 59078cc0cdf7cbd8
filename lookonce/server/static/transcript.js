// The conversation as it stands on the page.

import { button, copyText, element, iconButton } from "./dom.js";
import { codeBlock, Markdown } from "./markdown.js";
import { receiptCard } from "./receipt.js";
import { spokenFigure } from "./spoken.js";

const NEAR = 80; // pixels from the bottom within which new text is followed

export class Transcript {
  /** `transcribe(item)` answers what is said in a sound; `onEdit(turn)`, `onRetry(turn)`, `onResults(turn)`. */
  constructor(node, welcome, does) {
    this.node = node;
    this.welcome = welcome;
    this.does = does;
  }

  clear() {
    this.node.replaceChildren(this.welcome);
  }

  /** Shows turns that were answered before, and under the last one `note`: what `Answer.note` takes. */
  show(turns, note = null) {
    this.clear();
    let last = null;
    turns.forEach((turn, index) => {
      this.ask(turn);
      const attached = turns.slice(0, index + 1).flatMap(({ attachments }) => attachments);
      for (const said of turn.answers) (last = this.answer(turn)).fill(said, thumbnailsOf(attached));
    });
    if (note) last?.note(...note);
    this.toEnd();
  }

  /** Shows a question. */
  ask(turn) {
    this.welcome.remove();
    const figures = turn.attachments.map((item) => (item.kind === "audio"
      ? spokenFigure(item.figure(), () => this.does.transcribe(item))
      : item.figure()));
    const copy = iconButton("copy", "Copy question", () => copyText(copy, turn.question));
    turn.node = element(
      "article", { class: "asked", "aria-label": "You" },
      figures.length ? element("div", { class: "figures" }, ...figures) : null,
      turn.question ? element("p", { class: "said" }, turn.question) : null,
      actions(turn.question ? copy : null, iconButton("edit", "Edit question", () => this.does.onEdit(turn))),
    );
    this.node.append(turn.node);
  }

  /** The place of a turn's next answer. */
  answer(turn) {
    for (const old of this.node.querySelectorAll(".receipt[open]")) old.open = false;
    for (const old of this.node.querySelectorAll(".retry, .calls > .strong")) old.remove(); // of the last answer alone
    const answer = new Answer(this, turn);
    this.node.append(answer.node);
    this.toEnd();
    return answer;
  }

  /** Takes away the answers of the last turn, which are to be given anew. */
  takeAnswers(turn) {
    while (turn.node.nextElementSibling) turn.node.nextElementSibling.remove();
  }

  /** Follows new text, unless its reader has scrolled away. */
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.node;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    change();
    if (near) this.toEnd();
  }

  toEnd() {
    this.node.scrollTop = this.node.scrollHeight;
  }
}

/** Makers of small pictures, one for each item of the prompt that is known: a file has any number of pages. */
export function thumbnailsOf(attachments) {
  const file = attachments.findIndex(({ kind }) => kind === "file");
  return attachments.slice(0, file < 0 ? undefined : file).map((item) => () => item.thumbnail());
}

function actions(...buttons) {
  return element("div", { class: "row actions", role: "group", "aria-label": "Actions" }, ...buttons);
}

export class Answer {
  constructor(transcript, turn) {
    this.transcript = transcript;
    this.turn = turn;
    this.said = "";
    this.words = element("div", { class: "said" });
    this.markdown = new Markdown(this.words);
    this.thoughts = null;
    this.node = element("article", { class: "answer busy", "aria-label": "Model", "aria-busy": "true" }, this.words);
  }

  /** Shows an answer that was given before. */
  fill({ text, thinking, calls, facts, stopped, json }, thumbnails) {
    if (thinking) this.thinking(thinking);
    this.text(text, { json });
    if (calls.length) this.called({ calls });
    if (facts) this.receipt({ ...facts, thumbnails });
    if (stopped) this.note("Stopped.");
    this.end();
  }

  text(piece, { json = false } = {}) {
    this.said += piece;
    if (json) this.#follow(() => this.words.replaceChildren(codeBlock(this.said, "json")));
    else this.#follow(() => this.markdown.add(piece));
  }

  thinking(piece) {
    if (!this.thoughts) {
      this.thoughts = element("p", { class: "thoughts" });
      this.words.before(element("details", { class: "thinking" }, element("summary", {}, "Thinking"), this.thoughts));
    }
    this.#follow(() => this.thoughts.append(piece));
  }

  /** The calls of tools, with a place for what each gave. */
  called({ calls }) {
    const results = calls.map((call) => element("textarea", {
      rows: 2, value: call.result ?? "", readOnly: call.result !== null, "aria-label": `Result of ${call.name}`,
      placeholder: "What the tool gave",
    }));
    const send = button("Send results", { class: "strong" }, () => {
      calls.forEach((call, index) => { call.result = results[index].value; });
      results.forEach((field) => { field.readOnly = true; });
      send.remove();
      this.transcript.does.onResults(this.turn);
    });
    this.#follow(() => this.node.append(element(
      "section", { class: "calls", "aria-label": "Calls of tools" },
      ...calls.flatMap((call, index) => [
        element("h3", {}, "Call of ", element("code", {}, call.name)), codeBlock(call.written, "json"), results[index],
      ]),
      calls.every(({ result }) => result === null) ? send : null,
    )));
  }

  receipt(facts) {
    this.#follow(() => this.node.append(receiptCard(facts)));
  }

  note(text, { problem = false } = {}) {
    const role = problem ? "alert" : undefined;
    this.#follow(() => this.node.append(
      element("p", { class: problem ? "problem" : "note", role }, text),
    ));
  }

  end() {
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    if (!this.words.childNodes.length) this.words.remove();
    if (this.turn.unanswered) {
      this.turn.node.querySelector(".actions").remove(); // the question is where it was typed
      return;
    }
    const copy = iconButton("copy", "Copy answer", () => copyText(copy, this.said));
    const retry = iconButton("retry", "Try again", () => this.transcript.does.onRetry(this.turn));
    retry.classList.add("retry");
    this.#follow(() => this.node.append(actions(this.said ? copy : null, retry)));
  }

  #follow(change) {
    this.transcript.follow(change);
  }
}
