// A sound with its transcript: each word is lit while it is played, and plays from there when clicked.

import { element } from "./dom.js";

/** `figure` plays the sound; `transcribe()` answers `{text, words}`, words with times or none. */
export function spokenFigure(figure, transcribe) {
  const words = element("p", { class: "spoken", hidden: true, "aria-label": "Transcript" });
  const button = element("button", { type: "button", class: "quiet transcribe" }, "Transcript");
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Listening …";
    try {
      show(words, figure, await transcribe());
      button.remove();
    } catch (error) {
      words.replaceChildren(error.message);
      button.disabled = false;
      button.textContent = "Transcript";
    }
    words.hidden = false;
  });
  return element("div", { class: "sound-figure" }, figure, button, words);
}

function show(place, player, { text, words = [] }) {
  if (!words.length) {
    place.replaceChildren(text || "No words were heard.");
    return;
  }
  const spans = words.map(({ word, start }) => element("button", {
    type: "button", class: "word", onclick: () => {
      player.currentTime = start;
      player.play();
    },
  }, word.trim()));
  place.replaceChildren(...spans.flatMap((span) => [span, " "]));
  const light = () => {
    const now = player.currentTime;
    spans.forEach((span, at) => span.classList.toggle("lit", words[at].start <= now && now < words[at].end));
  };
  player.addEventListener("timeupdate", light);
  player.addEventListener("seeked", light);
  player.addEventListener("play", () => follow(player, light));
}

/** `timeupdate` comes four times a second: words are shorter. */
function follow(player, light) {
  light();
  if (!player.paused && !player.ended) requestAnimationFrame(() => follow(player, light));
}
