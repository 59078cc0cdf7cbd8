// The conversation as it stands on the page.

import { element } from "./dom.js";
import { receiptCard } from "./receipt.js";
import { spokenFigure } from "./spoken.js";

const NEAR = 80; // pixels from the bottom within which new text is followed

export class Transcript {
  /** `transcribe(item)` answers what is said in a sound. */
  constructor(node, welcome, transcribe) {
    this.node = node;
    this.welcome = welcome;
    this.transcribe = transcribe;
  }

  clear() {
    this.node.replaceChildren(this.welcome);
  }

  /** Shows a question, and returns the place of its answer. */
  begin(turn) {
    this.welcome.remove();
    for (const old of this.node.querySelectorAll(".receipt[open]")) old.open = false;
    const figures = turn.attachments.map((item) => (item.kind === "audio"
      ? spokenFigure(item.figure(), () => this.transcribe(item))
      : item.figure()));
    const asked = element(
      "article", { class: "asked", "aria-label": "You" },
      figures.length ? element("div", { class: "figures" }, ...figures) : null,
      turn.question ? element("p", { class: "said" }, turn.question) : null,
    );
    const answer = new Answer(this);
    this.node.append(asked, answer.node);
    this.toEnd();
    return answer;
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

export class Answer {
  constructor(transcript) {
    this.transcript = transcript;
    this.words = element("p", { class: "said" });
    this.node = element("article", { class: "answer busy", "aria-label": "Model", "aria-busy": "true" }, this.words);
  }

  text(piece) {
    this.transcript.follow(() => this.words.append(piece));
  }

  receipt(facts) {
    this.transcript.follow(() => this.node.append(receiptCard(facts)));
  }

  note(text, { problem = false } = {}) {
    const role = problem ? "alert" : undefined;
    this.transcript.follow(() => this.node.append(
      element("p", { class: problem ? "problem" : "note", role }, text),
    ));
  }

  end() {
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    if (!this.words.textContent) this.words.remove();
  }
}
