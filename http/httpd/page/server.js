// Asking the server: with the key of this tab, where it wants one.
// Everything here goes to the page's own origin; the policy it is served under allows no other.

const KEY = "plait-key";

const byId = (id) => document.getElementById(id);

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let keyDialog = null; // a promise while it is open: everybody who was refused waits for it
let declined = false; // after that, only what the user does asks again

// insist: whether to ask for a key again where the user gave none before
async function ask(path, options = {}, insist = false) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) {
    const isNew = key !== sessionStorage.getItem(KEY); // another request's refusal brought a key
    if (isNew) return ask(path, options, insist);
    const wrong = key ? "The server does not know this key." : "";
    if ((insist || !declined) && (await askForKey(wrong))) return ask(path, options, insist);
    throw new Refused(401, "The server wants an API key.");
  }
  if (!answer.ok) throw new Refused(answer.status, await whyNot(answer));
  return answer;
}

async function askJson(path, options) {
  return (await ask(path, options)).json();
}

async function whyNot(answer) {
  try {
    const told = await answer.json();
    return told.error.message;
  } catch {
    return `The server answers ${answer.status}.`;
  }
}

// Whether the user gave a key.
function askForKey(error) {
  keyDialog ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key-input");
    byId("key-error").textContent = error;
    input.value = "";
    dialog.addEventListener("close", () => {
      keyDialog = null;
      const given = dialog.returnValue === "use" ? input.value.trim() : "";
      input.value = "";
      declined = !given;
      if (given) sessionStorage.setItem(KEY, given);
      resolve(Boolean(given));
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
  return keyDialog;
}

function setUpKey() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close("use");
  });
  byId("key-cancel").addEventListener("click", () => dialog.close("cancel"));
  byId("key-button").addEventListener("click", async () => {
    if (await askForKey("")) document.dispatchEvent(new Event("key"));
  });
}

// An element with attributes and children; text is only ever text.
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
