// The card of the round under the pointer or the focus: its drafts and their outcome.

import { chips, describe } from "./panel.js";

const card = document.getElementById("card");

export function hideCard() {
  card.hidden = true;
  for (const span of document.querySelectorAll("[aria-describedby='card']")) span.removeAttribute("aria-describedby");
}

export function isCardOpen() {
  return !card.hidden;
}

/** Show the card of `round` under `span`, or above it if there is no room, always inside the window. */
export function showCard(round, span) {
  hideCard();
  const line = document.createElement("p");
  line.textContent = describe(round);
  card.replaceChildren(line, chips(round));
  card.hidden = false;
  span.setAttribute("aria-describedby", "card");
  const boxes = span.getClientRects();
  if (!boxes.length) return;
  const box = boxes[boxes.length - 1];
  const under = box.bottom + 8;
  const isRoom = under + card.offsetHeight < window.innerHeight - 8;
  card.style.top = `${isRoom ? under : Math.max(8, boxes[0].top - card.offsetHeight - 8)}px`;
  card.style.left = `${Math.max(12, Math.min(box.left, window.innerWidth - card.offsetWidth - 12))}px`;
}
