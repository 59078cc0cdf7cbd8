// Wires the page together.

import * as api from "./api.js";
import { acceptFiles, Attachment, Tray } from "./attachments.js";
import { Capture } from "./capture.js";
import { Captions } from "./captions.js";
import { Conversation } from "./conversation.js";
import { announce, byId, element, icon } from "./dom.js";
import { fromJson } from "./export.js";
import { History } from "./history.js";
import { sampleFile, SAMPLES } from "./samples.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Tiles } from "./tiles.js";
import { thumbnailsOf, Transcript } from "./transcript.js";
import { Watch } from "./watch.js";

const OPEN = "lookonce-open"; // of this tab's storage: the conversation that a reload shows again
const MODEL = "lookonce-model";

const question = byId("question");
const send = byId("send");
const samples = byId("samples");
const picker = byId("model");
const store = new Store();
let conversation = new Conversation();
let models = [];
let asking = null; // the AbortController of the question being answered
let edited = null; // the turn whose question is being edited

const settings = new Settings({ onClosed: findModels, onForget: forgetAll });
const transcript = new Transcript(byId("transcript"), byId("welcome"), {
  transcribe: (item) => api.transcribe(item.file, settings.key),
  onEdit: edit, onRetry: retry, onResults: answerResults,
});
const tray = new Tray(byId("chips"), { onChange: updateSend, modalities });
const capture = new Capture({ onFile: (file) => add([file]), takesFilms: () => modalities()?.includes("video") ?? true });
const history = new History(store, { onOpen: openKept, onFile: openSaved, onGone: (id) => id === conversation.id && leave() });
new Captions(() => settings.key);
const watch = new Watch(new Tiles(byId("tiles")), {
  onReady: findModels,
  savings: async () => (models.length ? api.savings(settings.key) : null), // models: the key is one that the server takes
});

async function findModels() {
  try {
    models = await api.models(settings.key);
  } catch (error) {
    if (error.status === 401) settings.open(error.message);
    return;
  }
  const wanted = picker.value || sessionStorage.getItem(MODEL);
  picker.replaceChildren(...models.map(({ id }) => element("option", { value: id, selected: id === wanted }, id)));
  picker.hidden = models.length === 0;
}

/** What the chosen model takes beside text; undefined while nobody knows. */
function modalities() {
  return models.find(({ id }) => id === picker.value)?.modalities;
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

function add(files) {
  tray.addFiles(files);
  question.focus();
}

async function ask() {
  const turn = { question: question.value.trim(), attachments: tray.items, answers: [] };
  if (asking || (!turn.question && !turn.attachments.length)) return;
  tray.take();
  setQuestion("");
  const instead = edited ? conversation.cutFrom(edited) : [];
  if (edited) {
    transcript.show(conversation.turns);
    setEdited(null);
  }
  transcript.ask(turn);
  const talk = conversation;
  await run(turn, (request) => talk.ask(turn, request, instead), { instead });
}

async function retry(turn) {
  if (asking || turn !== conversation.turns.at(-1)) return;
  transcript.takeAnswers(turn);
  const talk = conversation;
  await run(turn, (request) => talk.retry(turn, request), { again: true });
}

/** Goes on after the results of a turn's calls were typed. */
async function answerResults(turn) {
  if (asking) return;
  const talk = conversation;
  await run(turn, (request) => talk.answer(turn, request), { again: true });
}

/** Shows one answer while it comes, and keeps the conversation when it has ended. */
async function run(turn, work, { again = false, instead = [] } = {}) {
  const talk = conversation;
  const answer = transcript.answer(turn);
  const controller = new AbortController();
  setAsking(controller);
  try {
    await work({ model: picker.value || undefined, settings, signal: controller.signal, view: viewOf(answer, talk) });
    announce(turn.answers.at(-1)?.text ?? "");
  } catch (error) {
    failed(turn, answer, error, { again, instead });
  } finally {
    answer.end();
    await keep(talk).catch((error) => announce(`This conversation could not be kept: ${error.message}`));
    if (asking === controller) setAsking(null);
    await watch.look();
    await watch.lookAtSavings();
  }
}

function viewOf(answer, talk) {
  return {
    text: (piece, { json }) => answer.text(piece, { json }),
    thinking: (piece) => answer.thinking(piece),
    called: (said) => answer.called(said),
    ended: (facts) => answer.receipt({ ...facts, thumbnails: thumbnailsOf(talk.attachments()) }),
  };
}

/**
 * What was not answered at all goes back to where it was typed, and a file's refusal is said at the file. An edited
 * question, and what was said after it, then stand as before (`instead`).
 */
function failed(turn, answer, error, { again, instead }) {
  if (!answer.node.isConnected) return; // another conversation is shown
  const stopped = error.name === "AbortError";
  const unanswered = !again && !turn.answers.length && !question.value && !tray.items.length;
  turn.unanswered = !again && !turn.answers.length;
  if (unanswered) {
    setQuestion(turn.question);
    tray.put(turn.attachments);
    setEdited(instead[0] ?? null);
  }
  const item = unanswered ? refusedPart(turn, error, instead.length) : null;
  if (item) {
    transcript.show(conversation.turns);
    tray.refuse(item, error);
  } else {
    const note = [stopped ? "Stopped." : error.message, { problem: !stopped }];
    const asBefore = again ? !answer.said : instead.length && !turn.answers.length;
    if (asBefore) transcript.show(conversation.turns, note);
    else answer.note(...note);
  }
  if (error.status === 401) settings.open(error.message);
}

/** The attachment that a server's error names, if it is one of this turn, which `after` others have come back after. */
function refusedPart(turn, { param }, after) {
  const [, message, part] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(param ?? "") ?? [];
  const { turns } = conversation;
  const earlier = turns.slice(0, turns.length - after).reduce((count, { answers }) => (
    count + 1 + answers.reduce((said, { calls }) => said + 1 + calls.length, 0)
  ), settings.systemMessages.length);
  return Number(message) === earlier ? turn.attachments[Number(part)] : undefined;
}

async function keep(talk) {
  if (!settings.keeps || talk.gone || !talk.turns.length) return;
  const record = talk.record();
  const held = await store.get(talk.id);
  if (held?.named) Object.assign(record, { title: held.title, named: true });
  await store.put(record);
  if (talk === conversation) sessionStorage.setItem(OPEN, talk.id);
  await history.refresh(conversation.id);
}

function setEdited(turn) {
  edited = turn;
  byId("editing").hidden = !turn;
}

function edit(turn) {
  if (asking) return;
  setEdited(turn);
  tray.put(turn.attachments);
  setQuestion(turn.question);
  question.focus();
}

function stopEditing() {
  setEdited(null);
  tray.take();
  setQuestion("");
  question.focus();
}

/** Shows another conversation; what is being answered is stopped. */
function show(next) {
  asking?.abort();
  setAsking(null);
  if (edited) stopEditing();
  for (const item of conversation.attachments()) item.forget();
  conversation = next;
  transcript.show(next.turns);
  history.refresh(next.id);
}

function newChat() {
  sessionStorage.removeItem(OPEN);
  show(new Conversation());
  question.focus();
}

function openKept(record) {
  const turns = record.turns.map((turn) => ({
    ...turn, attachments: turn.attachments.map(({ file, kind }) => new Attachment(file, kind)),
  }));
  sessionStorage.setItem(OPEN, record.id);
  show(new Conversation({ ...record, turns }));
  question.focus();
}

async function openSaved(file) {
  const record = new Conversation(fromJson(await file.text())).record();
  if (settings.keeps) await store.put(record);
  openKept(record);
}

async function reopen() {
  const id = sessionStorage.getItem(OPEN);
  const record = id && await store.get(id);
  if (record && !conversation.turns.length) openKept(record);
}

/** Shows a new chat instead of one that was deleted, and is not kept again. */
function leave() {
  conversation.gone = true;
  newChat();
}

async function forgetAll() {
  leave();
  await store.clear();
  await history.refresh();
}

function showSources(shown) {
  byId("sources").hidden = !shown;
  byId("attach").setAttribute("aria-expanded", String(shown));
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
  const opens = event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey);
  if (!opens || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  newChat();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!byId("sources").hidden) {
    showSources(false);
    byId("attach").focus();
  } else if (asking) asking.abort();
  else if (edited) stopEditing();
});
picker.addEventListener("change", () => sessionStorage.setItem(MODEL, picker.value));
byId("new-chat").addEventListener("click", newChat);
byId("stop-editing").addEventListener("click", stopEditing);
byId("attach").addEventListener("click", () => showSources(byId("sources").hidden));
byId("adding").addEventListener("focusout", ({ relatedTarget }) => {
  if (!byId("adding").contains(relatedTarget)) showSources(false);
});
byId("add-files").addEventListener("click", () => byId("files").click());
byId("sources").addEventListener("click", ({ target }) => {
  const { source } = target.dataset;
  showSources(false);
  if (source) capture.open(source);
});
byId("files").addEventListener("change", (event) => {
  add(event.target.files);
  event.target.value = "";
});
acceptFiles(byId("drop"), add);

updateSend();
showSamples();
reopen();
question.focus();
