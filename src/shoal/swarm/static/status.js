"use strict";
// Whatever others wrote is set as text, never as markup.
const place = (id) => document.getElementById(id);
const cell = (kind, text) => {
  const made = document.createElement(kind);
  made.textContent = String(text);
  return made;
};
const list = (id, values) => place(id).replaceChildren(...values.flatMap(([name, value]) => [cell("dt", name), cell("dd", value)]));

async function show() {
  const state = place("state");
  try {
    const answer = await fetch("api/status");
    const status = await answer.json();
    if (!answer.ok) throw new Error(status.error?.message ?? status.error ?? answer.status);
    const age = Math.max(0, Math.round(Date.now() / 1000 - status.time_s));
    state.textContent = `${status.connected ? "connected" : "not connected"}; written ${age} s ago`;
    state.className = status.connected ? "" : "away";
    const plain = Object.entries(status).filter(([, value]) => typeof value !== "object" && value !== "");
    list("values", plain);
    list("refused", Object.entries(status.refused ?? {}));
    const peers = Object.entries(status.peers ?? {}).map(([id, peer]) => {
      const row = document.createElement("tr");
      row.append(...[id, peer.trust, peer.newcomer ? "yes" : "no", peer.taken, peer.gaps].map((text) => cell("td", text)));
      return row;
    });
    place("peers").replaceChildren(...peers);
  } catch (error) {
    state.textContent = `no status: ${error.message}`;
    state.className = "away";
  }
}

show();
setInterval(show, 2000);
