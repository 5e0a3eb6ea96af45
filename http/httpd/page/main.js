// Views, and what keeps them fresh.

const VIEWS = ["chat", "live", "capacity"];

function currentView() {
  const asked = location.hash.slice(1);
  return VIEWS.includes(asked) ? asked : "chat";
}

function showView() {
  const view = currentView();
  for (const each of VIEWS) byId(`view-${each}`).hidden = each !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "chat" ? "Plait" : `${view[0].toUpperCase()}${view.slice(1)} · Plait`;
  if (view === "capacity") readCapacity();
  if (view === "live") live.treeAt = 0;
  if (view === "chat") byId("question").focus({ preventScroll: true });
}

// One reading at a time: a slow server is asked less often, not more.
async function keepReading() {
  while (true) {
    const began = performance.now();
    await readLive();
    const left = READ_MS - (performance.now() - began);
    await new Promise((resolve) => setTimeout(resolve, Math.max(READ_MS / 4, left)));
  }
}

setUpKey();
setUpChat();
addEventListener("hashchange", showView);
document.addEventListener("key", showView);
showView();
keepReading();
