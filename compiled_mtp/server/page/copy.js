// Buttons that copy text.

const SHOWN_MS = 1500;

/** Copy a text; return whether that worked. Browsers have a clipboard only for pages of this machine or over TLS. */
async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "unseen";
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  return isCopied;
}

/** Return a button that copies what `textOf` returns, and says whether it did. */
export function copyButton(label, textOf) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = label;
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    button.textContent = (await copy(textOf())) ? "Copied" : "Not copied";
    button.focus();
    setTimeout(() => {
      button.textContent = label;
    }, SHOWN_MS);
  });
  return button;
}
