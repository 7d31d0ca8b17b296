"use strict";
// Talks with the model, and copies what a client needs. Texts only ever become text nodes.
const form = document.getElementById("talk"), box = document.getElementById("text"), said = document.getElementById("said");
const button = form.querySelector("button"), messages = [];
let asking = null;

function line(role) {
  const one = document.createElement("p"), who = document.createElement("strong"), text = document.createElement("span");
  one.className = "spoken";
  who.textContent = `${role}: `;
  one.append(who, text);
  said.append(one);
  return text;
}

async function* pieces(answer) {
  let rest = "";
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue;
      const data = JSON.parse(event.slice("data: ".length));
      if (data.error) throw new Error(data.error.message);
      for (const choice of data.choices) yield choice.text ?? choice.delta.content ?? "";
    }
  }
}

async function ask(text) {
  const { path, model } = form.dataset, chats = path.endsWith("/chat/completions");
  messages.push({ role: "user", content: text });
  line("you").textContent = text;
  const shown = line("model");
  let reply = "";
  asking = new AbortController();
  button.textContent = "Stop";
  try {
    const given = chats ? { messages } : { prompt: text, max_tokens: 256 };
    const answer = await fetch(path.slice(1), {
      method: "POST", headers: { "Content-Type": "application/json" }, signal: asking.signal,
      body: JSON.stringify({ model, stream: true, ...given }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const piece of pieces(answer)) shown.textContent = reply += piece;
    messages.push({ role: "assistant", content: reply });
  } catch (error) {
    messages.pop(); // a question without its answer
    if (error.name !== "AbortError") shown.append(` [${error.message}]`);
  }
  asking = null;
  button.textContent = "Send";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) return asking.abort();
  ask(box.value);
  box.value = "";
});
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!asking) form.requestSubmit();
});
for (const code of navigator.clipboard ? document.querySelectorAll("td code") : []) { // http beyond loopback has none
  const copy = document.createElement("button");
  copy.textContent = "Copy";
  copy.ariaLabel = `Copy ${code.closest("tr").cells[0].textContent}`;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = "Copied";
  });
  code.after(" ", copy);
}
