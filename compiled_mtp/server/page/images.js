// Images for the next prompt: pasted, dropped or chosen. They stay in this page's memory until they are sent.

import { ServiceError } from "./api.js";

// A canvas shows them: the page's policy lets no element load what a user gives.
const THUMBNAIL = 96;

/**
 * The images beside the prompt. `say(error)` shows what could not be read, and null clears it; `sent()` counts the
 * images of the chat's turns, which are sent again with the next.
 */
export class ImageTray {
  constructor(box, say, sent) {
    this.box = box;
    this.say = say;
    this.sent = sent;
    this.most = 0;
    this.images = [];
    this.list = box.querySelector("ul");
    this.input = box.querySelector("input");
    this.input.addEventListener("change", () => {
      this.add(this.input.files);
      this.input.value = "";
    });
    box.querySelector("button").addEventListener("click", () => this.input.click());
  }

  /** Take images that are pasted or dropped on `element`. */
  listen(element) {
    element.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    element.addEventListener("dragover", (event) => this.isOpen() && event.preventDefault());
    element.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  take(event, data) {
    const files = [...(data?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!this.isOpen() || !files.length) return;
    event.preventDefault();
    this.add(files);
  }

  isOpen() {
    return this.most > 0 && !this.box.hidden;
  }

  /** Allow so many images of a chat; 0 hides the tray. */
  allow(most) {
    this.most = most;
    this.box.classList.toggle("off", most === 0);
    if (!most) this.put([]);
  }

  async add(files) {
    this.say(null);
    for (const file of files) {
      try {
        if (this.images.length + this.sent() >= this.most) {
          throw new ServiceError(`This server takes at most ${this.most} images in a chat.`);
        }
        const [url, bitmap] = await Promise.all([read(file), createImageBitmap(file)]);
        this.images.push({ url, bitmap, name: file.name || "pasted image" });
      } catch (error) {
        this.say(error instanceof ServiceError ? error : new ServiceError(`${file.name} is not an image that this browser reads.`));
      }
    }
    this.draw();
  }

  draw() {
    this.list.replaceChildren(
      ...this.images.map((image) => {
        const item = document.createElement("li");
        const remove = document.createElement("button");
        remove.type = "button";
        remove.textContent = "×";
        remove.setAttribute("aria-label", `Remove ${image.name}`);
        remove.addEventListener("click", () => {
          this.images = this.images.filter((one) => one !== image);
          this.draw();
          this.box.querySelector("button").focus();
        });
        item.append(thumbnail(image), remove);
        return item;
      }),
    );
  }

  /** Show these images in the place of others. */
  put(images) {
    this.images = [...images];
    this.draw();
  }
}

/** The content of a message with a text and images. */
export function withImages(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text }];
}

/** The images of a sent prompt, for the transcript; none without images. */
export function shown(images) {
  if (!images.length) return [];
  const row = document.createElement("div");
  row.className = "pictures";
  row.append(...images.map(thumbnail));
  return [row];
}

function thumbnail({ bitmap, name }) {
  const canvas = document.createElement("canvas");
  const scale = THUMBNAIL / Math.max(bitmap.width, bitmap.height);
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  canvas.className = "thumbnail";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  return canvas;
}

/** The file as a data URI. */
function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new ServiceError(`${file.name} could not be read.`)));
    reader.readAsDataURL(file);
  });
}
