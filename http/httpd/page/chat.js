// The playground: one conversation, streamed. Leaving the stream is what stops the server.

const chat = { messages: [], abort: null, model: null };

// Data of server-sent events, as they come.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parameters() {
  const told = {};
  for (const field of byId("parameters").elements) {
    if (!field.name || field.name === "system" || field.value === "") continue;
    told[field.name] = Number(field.value);
  }
  return told;
}

function bodyOf() {
  const system = byId("parameters").elements.system.value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  return {
    model: chat.model, messages: [...before, ...chat.messages], stream: true,
    stream_options: { include_usage: true }, ...parameters(),
  };
}

// One answer's element, and how it grows.
class AnswerView {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.tokens = null;
    this.finish = null;
    this.sent = performance.now();
    this.first = null;
    this.last = null;
    this.text = make("div", { class: "text" });
    this.facts = make("p", { class: "facts" });
    this.thought = make("div");
    this.thoughts = make("details", { class: "thought", hidden: "" }, make("summary", {}, "Reasoning"), this.thought);
    this.element = make("article", { class: "said assistant", "aria-busy": "true", "aria-label": "Answer" },
      this.thoughts, this.text, this.facts);
    this.due = false;
  }

  take(chunk) {
    if (chunk.error) throw new Refused(500, chunk.error.message);
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const content = choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? "";
    if (!content && !reasoning) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.content += content;
    this.reasoning += reasoning;
    this.redraw();
  }

  // At most once a frame, however fast tokens come.
  redraw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.show();
    });
  }

  show() {
    const follow = isAtEnd();
    this.thoughts.hidden = !this.reasoning;
    this.thought.textContent = this.reasoning;
    this.text.replaceChildren(...markdown(this.content));
    if (follow) scrollToEnd();
  }

  end(how, failed = false) {
    this.element.setAttribute("aria-busy", "false");
    this.show();
    const facts = how ? [how] : [];
    if (this.tokens !== null) facts.push(`${count(this.tokens)} tokens`);
    if (this.tokens > 1 && this.last > this.first) {
      facts.push(`${short(((this.tokens - 1) * 1e3) / (this.last - this.first))} tokens/s`);
    }
    if (this.first) facts.push(`first after ${duration((this.first - this.sent) / 1e3)}`);
    if (this.finish === "length") facts.push("cut at its longest");
    this.facts.textContent = facts.join(" · ");
    this.facts.classList.toggle("error", failed);
    scrollToEnd();
  }
}

const scroller = () => (getComputedStyle(byId("log")).overflowY === "visible" ? document.scrollingElement : byId("log"));

function isAtEnd() {
  const box = scroller();
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function scrollToEnd() {
  const box = scroller();
  box.scrollTop = box.scrollHeight;
}

async function submit(question) {
  if (chat.abort || !question.trim()) return;
  byId("welcome")?.setAttribute("hidden", "");
  const asked = make("article", { class: "said user", "aria-label": "You" }, question);
  const view = new AnswerView();
  byId("log").append(asked, view.element);
  chat.messages.push({ role: "user", content: question });
  chat.abort = new AbortController();
  showBusy(true);
  scrollToEnd();
  try {
    await stream(view, chat.abort.signal);
    chat.messages.push({ role: "assistant", content: view.content });
    view.end("");
  } catch (error) {
    endBadly(view, error, question);
  }
  chat.abort = null;
  showBusy(false);
}

async function stream(view, signal) {
  chat.model ??= (await (await ask("/v1/models", { signal }, true)).json()).data[0].id;
  view.sent = performance.now();
  const answer = await ask("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(bodyOf()), headers: { "content-type": "application/json" },
  }, true);
  for await (const chunk of eventsOf(answer)) view.take(chunk);
  if (!view.finish) throw new Refused(500, "The server ended the answer before its end.");
}

// Stopped: what came is part of the conversation. Refused: the question is back where it was typed.
function endBadly(view, error, question) {
  if (error.name === "AbortError") {
    chat.messages.push({ role: "assistant", content: view.content });
    view.end("stopped");
    return;
  }
  chat.messages.pop();
  view.end(error instanceof Refused ? error.message : "The server cannot be reached.", true);
  const box = byId("question");
  if (!box.value) box.value = question;
  fit(box);
}

function showBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (!busy && byId("view-chat").contains(document.activeElement)) byId("question").focus({ preventScroll: true });
}

function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function setUpChat() {
  const box = byId("question");
  const send = () => {
    const question = box.value;
    if (chat.abort || !question.trim()) return;
    box.value = "";
    fit(box);
    submit(question);
  };
  const stop = () => chat.abort?.abort();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  box.addEventListener("input", () => fit(box));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) stop();
  });
  byId("stop").addEventListener("click", stop);
  addEventListener("pagehide", stop); // a browser may keep a page that was left, and its requests
  byId("parameters").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => {
    stop();
    chat.messages = [];
    byId("log").replaceChildren(byId("welcome") ?? "");
    byId("welcome")?.removeAttribute("hidden");
    box.focus();
  });
  const wide = matchMedia("(min-width: 861px)");
  const unfold = () => { byId("settings").open = wide.matches; };
  wide.addEventListener("change", unfold);
  unfold();
}
