"use strict";
// Whatever people or peers wrote is set as text, never as HTML.

const POLL_MS = 1500;
const byId = (id) => document.getElementById(id);
let asked = null; // the question on the page
let watching = 0; // timer of the wait for the offer

async function call(path, body) {
  const request = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  const reply = await fetch(path, request);
  const value = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(value.error.message), { status: reply.status });
  return value;
}

function say(text) { byId("message").textContent = text; }

async function ask(passed) {
  clearTimeout(watching);
  say("");
  byId("send").disabled = true;
  byId("verdict").hidden = true;
  byId("question").setAttribute("aria-busy", "true");
  try {
    asked = await call("api/question", { pass: passed });
  } catch (error) {
    asked = null;
    say(error.message);
    return;
  } finally {
    byId("question").setAttribute("aria-busy", "false");
  }
  byId("task").textContent = asked.task;
  byId("instructions").textContent = asked.instructions;
  byId("instructions").hidden = !asked.instructions;
  byId("question").textContent = asked.question;
  byId("answer").value = "";
  byId("answer").disabled = byId("send").disabled = false;
  status();
}

async function send() {
  if (!asked || byId("send").disabled) return;
  say("");
  byId("send").disabled = true;
  try {
    show(await call("api/answer", { question: asked.id, text: byId("answer").value }));
    watch(asked.id);
    status();
  } catch (error) {
    say(error.message);
    byId("send").disabled = error.status === 404;
  }
}

function show(verdict) {
  const left = verdict.tries_left;
  const outcome = byId("outcome");
  outcome.className = verdict.right ? "right" : "wrong";
  outcome.textContent = `Verdict: ${words(verdict)}` + (left ? ` - ${left} ${left === 1 ? "try" : "tries"} left` : "");
  byId("expected").textContent = verdict.truth ?? "";
  byId("truth").hidden = verdict.truth === null || verdict.right;
  byId("shared").textContent = "";
  byId("list").replaceChildren(...verdict.others.map(other));
  byId("others").hidden = !verdict.others.length;
  byId("verdict").hidden = false;
  byId("send").disabled = byId("answer").disabled = !left;
  if (left) byId("answer").select();
  else byId("next").focus();
}

function words(judged) {
  if (judged.status !== "scored") return "none, the scorer gave up on it";
  return judged.right ? "right" : judged.reward > 0 ? `partly right (${judged.reward})` : "not right";
}

function other(one) {
  const item = document.createElement("li");
  item.dir = "auto";
  const who = document.createElement("small");
  who.textContent = `${one.generator}${one.model ? ` ${one.model}` : ""}: ${words(one)}`;
  item.append(one.text, who);
  return item;
}

async function watch(id) {
  clearTimeout(watching);
  let state;
  try {
    ({ state } = await call(`api/state/${encodeURIComponent(id)}`));
  } catch {
    return;
  }
  if (!asked || asked.id !== id) return;
  byId("shared").textContent = {
    shared: "The answers to this question are offered to the swarm.",
    dropped: "This question closed before there were answers that differ; they are not shared.",
    open: "Kept. Right and wrong answers to one question become an offer, a moment after the last of them.",
  }[state];
  if (state === "open") watching = setTimeout(watch, POLL_MS, id);
  else if (state === "shared") status();
}

async function status() {
  const now = await call("api/status").catch(() => null);
  byId("status").textContent = now === null ? "" :
    `Node ${now.peer_id.slice(0, 12)} of the swarm ${now.swarm}, ${now.connected ? "connected" : "not connected"}. ` +
    `${now.answers} answers so far, ${now.shared} offers.`;
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("answer").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); byId("form").requestSubmit(); }
});
byId("next").addEventListener("click", () => ask(asked ? asked.id : null));
ask(null);
