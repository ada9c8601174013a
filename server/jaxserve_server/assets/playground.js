"use strict";
const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
let conversation = [];
let running = null; // the AbortController of the answer that streams

// Text only ever becomes text: no answer is read as HTML.
function add(parent, tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function turn(role, text) {
  $("empty").hidden = true;
  const box = add($("turns"), "article", `turn ${role}`);
  add(box, "h2", "", role === "user" ? "You" : "Model");
  return { box, text: add(box, "p", "", text) };
}

function problem(message) {
  add($("turns"), "div", "problem", message).setAttribute("role", "alert");
  $("turns").scrollTop = $("turns").scrollHeight;
}

async function messageOf(response) {
  try {
    const { error } = await response.json();
    const where = error.param && !error.message.includes(error.param) ? ` (${error.param})` : "";
    return `${response.status}: ${error.message}${where}`;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function loadModels() {
  try {
    const response = await fetch("v1/models");
    if (!response.ok) throw new Error(await messageOf(response));
    const { data } = await response.json();
    $("model").replaceChildren(...data.map((card) => new Option(card.id, card.id)));
    $("served").textContent = `context ${data[0].max_model_len} tokens`;
  } catch (error) {
    $("served").textContent = "no model yet";
    problem(error.message);
  }
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if ($("model").value) body.model = $("model").value;
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("stop").value) body.stop = $("stop").value;
  return body;
}

// The data of each server-sent event, until [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  running = new AbortController();
  const { signal } = running;
  const start = performance.now();
  let first = null;
  let usage = null;
  let reason = "stopped";
  let box = null;
  let text = "";
  busy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal,
    });
    if (!response.ok) throw new Error(await messageOf(response));
    box = turn("assistant", "");
    box.box.classList.add("running");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.delta.content) {
        first ??= performance.now();
        text += choice.delta.content;
        follow(() => { box.text.textContent = text; });
      }
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    if (!signal.aborted) problem(error.message);
  } finally {
    const end = performance.now();
    running = null;
    busy(false);
    if (text) conversation.push({ role: "assistant", content: text });
    else giveBack(box);
    if (box && text) {
      box.box.classList.remove("running");
      follow(() => add(box.box, "div", "quiet", summary(usage, reason, start, first, end)));
    }
  }
}

// A question without an answer is no part of the conversation: it goes back to be sent again.
function giveBack(box) {
  box?.box.remove();
  const last = conversation.pop();
  if (last && !$("message").value) $("message").value = last.content;
  [...document.querySelectorAll(".turn.user")].pop()?.remove();
}

function summary(usage, reason, start, first, end) {
  const parts = [reason];
  if (usage) {
    parts.push(`${usage.prompt_tokens} tokens in`, `${usage.completion_tokens} out`);
    const seconds = (end - first) / 1000;
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first) parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  return parts.join(" · ");
}

// Changes the page, and keeps its end in sight where it was in sight.
function follow(change) {
  const turns = $("turns");
  const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  change();
  if (atEnd) turns.scrollTop = turns.scrollHeight;
}

function busy(is) {
  $("send").hidden = is;
  $("stop_button").hidden = !is;
  $("clear").disabled = is;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("message").value.trim();
  if (!content || running) return;
  document.querySelectorAll(".problem").forEach((old) => old.remove());
  conversation.push({ role: "user", content });
  follow(() => turn("user", content));
  $("message").value = "";
  answer();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop_button").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  conversation = [];
  document.querySelectorAll(".turn, .problem").forEach((old) => old.remove());
  $("empty").hidden = false;
  $("message").focus();
});
// Beside the conversation on a wide page, folded above it on a narrow one.
const wide = matchMedia("(min-width: 761px)");
const unfold = () => { $("settings").open = wide.matches; };
wide.addEventListener("change", unfold);
unfold();
$("fields").addEventListener("submit", (event) => event.preventDefault());
loadModels();
