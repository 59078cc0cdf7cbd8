// Wires the page together.

import * as api from "./api.js";
import { acceptFiles, Tray } from "./attachments.js";
import { Captions } from "./captions.js";
import { Conversation } from "./conversation.js";
import { byId, element, icon } from "./dom.js";
import { sampleFile, SAMPLES } from "./samples.js";
import { Settings } from "./settings.js";
import { Tiles } from "./tiles.js";
import { Transcript } from "./transcript.js";
import { Watch } from "./watch.js";

const question = byId("question");
const send = byId("send");
const samples = byId("samples");
const conversation = new Conversation();
const settings = new Settings(findModel);
const transcript = new Transcript(byId("transcript"), byId("welcome"), (item) => api.transcribe(item.file, settings.key));
const tray = new Tray(byId("chips"), {
  onChange: updateSend,
  onRefused: (name) => announce(`${name} is neither a picture nor a sound`),
});
new Captions(() => settings.key);
let model = null;
let asking = null; // the AbortController of the question being answered

const watch = new Watch(new Tiles(byId("tiles")), { onReady: findModel });

async function findModel() {
  try {
    [{ id: model }] = await api.models(settings.key);
    byId("model").textContent = model;
  } catch (error) {
    if (error.status === 401) settings.open(error.message);
  }
}

function announce(text) {
  byId("announcer").textContent = text;
}

function updateSend() {
  send.disabled = !asking && !question.value.trim() && !tray.items.length;
}

function setAsking(controller) {
  asking = controller;
  send.setAttribute("aria-label", asking ? "Stop" : "Send");
  send.replaceChildren(icon(asking ? "stop" : "send"));
  send.classList.toggle("stopping", Boolean(asking));
  updateSend();
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function setQuestion(text) {
  question.value = text;
  fitQuestion();
  updateSend();
}

async function ask() {
  const turn = { question: question.value.trim(), attachments: tray.items };
  if (asking || (!turn.question && !turn.attachments.length)) return;
  tray.take();
  setQuestion("");
  const answer = transcript.begin(turn);
  const controller = new AbortController();
  setAsking(controller);
  try {
    await conversation.ask(turn, { model, settings, signal: controller.signal, view: viewOf(answer) });
    announce(turn.answer);
  } catch (error) {
    failed(turn, answer, error);
  } finally {
    answer.end();
    if (asking === controller) setAsking(null);
    watch.look();
  }
}

function viewOf(answer) {
  return {
    text: (piece) => answer.text(piece),
    ended: (facts) => {
      const thumbnails = conversation.attachments().map((item) => () => item.thumbnail());
      answer.receipt({ ...facts, thumbnails });
    },
  };
}

/** What was not answered at all goes back to where it was typed. */
function failed(turn, answer, error) {
  if (!answer.node.isConnected) return; // a new chat has begun
  const stopped = error.name === "AbortError";
  answer.note(stopped ? "Stopped." : error.message, { problem: !stopped });
  if (!turn.answer && !question.value && !tray.items.length) {
    setQuestion(turn.question);
    tray.put(turn.attachments);
  }
  if (error.status === 401) settings.open(error.message);
}

function newChat() {
  asking?.abort();
  for (const item of conversation.attachments()) item.forget();
  conversation.clear();
  transcript.clear();
  question.focus();
}

async function trySample(sample) {
  tray.put([]);
  tray.addFiles([await sampleFile(sample)]);
  setQuestion(sample.question);
  question.focus();
  await ask();
}

async function showSamples() {
  for (const sample of SAMPLES) {
    const file = await sampleFile(sample);
    const look = file.type.startsWith("image/")
      ? element("img", { src: URL.createObjectURL(file), alt: "" })
      : element("span", { class: "sound" }, icon("sound"));
    samples.append(element("li", {}, element(
      "button", { type: "button", class: "sample", onclick: () => trySample(sample) },
      look, element("strong", {}, sample.title), element("span", {}, sample.question),
    )));
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) asking.abort();
  else ask();
});
question.addEventListener("input", () => {
  fitQuestion();
  updateSend();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && asking && !settings.dialog.open) asking.abort();
});
byId("new-chat").addEventListener("click", newChat);
byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", (event) => {
  tray.addFiles(event.target.files);
  event.target.value = "";
  question.focus();
});
acceptFiles(byId("drop"), (files) => {
  tray.addFiles(files);
  question.focus();
});

updateSend();
showSamples();
question.focus();
