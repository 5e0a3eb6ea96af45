// What the machine and the model can carry: /capacity, read when somebody looks.

async function readCapacity() {
  const absent = byId("capacity-absent");
  try {
    showCapacity(await askJson("/capacity"));
    absent.hidden = true;
  } catch (error) {
    absent.hidden = false;
    absent.textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
  }
}

function showCapacity(told) {
  const parts = [];
  if (told.notes.length) parts.push(panel("Worth knowing", "", ...told.notes.map((note) => make("p", { class: "note" }, note))));
  if (told.model) parts.push(modelPanel(told));
  for (const gpu of told.devices.gpus) parts.push(gpuPanel(gpu));
  if (!told.devices.gpus.length) parts.push(panel("Machine", told.devices.absent ?? "no GPU", facts(hostFacts(told.host))));
  if (told.concurrency.length) parts.push(concurrencyPanel(told.concurrency));
  if (told.decode.length) parts.push(decodePanel(told.decode));
  byId("capacity-body").replaceChildren(...parts);
}

function panel(title, note, ...children) {
  const heading = make("h2", {}, title);
  return make("section", { class: "panel", "aria-label": title },
    make("header", {}, heading, make("p", { class: "muted" }, note)), ...children);
}

function facts(pairs) {
  return make("dl", { class: "facts-grid" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function hostFacts(host) {
  return [["CPUs", count(host.cpus)], ["Memory", bytes(host.memory_total_bytes)], ["Available", bytes(host.memory_available_bytes)]];
}

function modelPanel(told) {
  const { model, split } = told;
  const tokens = told.measured_kv_tokens ?? split?.kv_tokens ?? null;
  return panel(model.name, `${model.architecture}, ${model.dtype}, on ${told.device ?? "no device"}`, facts([
    ["Parameters", short(model.parameters)],
    ["Weights", bytes(model.weight_bytes)],
    ["Context, tokens", count(model.context_tokens)],
    ["KV cache a token", bytes(model.kv_bytes_per_token)],
    ["KV cache, tokens", count(tokens)],
    ["Ranks", count(told.ranks)],
  ]));
}

function gpuPanel(gpu) {
  const { activity } = gpu;
  const title = `GPU ${gpu.index}: ${gpu.name ?? "unknown"}`;
  const links = gpu.nvlink ? `, NVLink ${gpu.nvlink.active} of ${gpu.nvlink.present}` : "";
  const bus = known(gpu.pcie.generation) ? `PCIe ${gpu.pcie.generation} ×${gpu.pcie.width}${links}` : "";
  return panel(title, bus, ...(activity.memory ? [memoryBar(gpu)] : []), facts([
    ["Memory used", `${bytes(activity.memory?.used_bytes)} of ${bytes(activity.memory?.total_bytes)}`],
    ["Busy", known(activity.busy_share) ? percent(activity.busy_share * 100) : NONE],
    ["Power", known(activity.power_w) ? `${Math.round(activity.power_w)} of ${count(activity.power_limit_w)} W` : NONE],
    ["Temperature", known(activity.temperature_c) ? `${activity.temperature_c} °C` : NONE],
    ["Clock", known(activity.sm_mhz) ? `${count(activity.sm_mhz)} of ${count(gpu.max_sm_mhz)} MHz` : NONE],
    ["ECC errors", activity.ecc ? count(activity.ecc.uncorrected) : NONE],
    ["Slowed down by", activity.throttled_by?.join(", ") || "nothing"],
  ]), ...(gpu.processes?.length ? [processTable(gpu.processes)] : []));
}

function memoryBar(gpu) {
  const whole = gpu.activity.memory.total_bytes;
  const sum = (processes) => (processes ?? []).reduce((all, each) => all + (each.used_bytes ?? 0), 0);
  const ours = sum(gpu.processes?.filter((each) => each.is_ours));
  const others = Math.max(0, gpu.activity.memory.used_bytes - ours);
  const bar = make("p", { class: "meter wide", role: "img", "aria-label": `${bytes(ours)} ours, ${bytes(others)} others', of ${bytes(whole)}` },
    ...[["ours", ours], ["others", others]].map(([name, value]) => {
      const part = make("i", { class: name });
      part.style.width = `${(value / whole) * 100}%`;
      return part;
    }));
  bar.style.marginBottom = "14px";
  return bar;
}

function table(heads, rows) {
  const cell = (name, text, index) => make(name, { class: index ? "number" : null, ...(name === "th" ? { scope: "col" } : {}) }, text);
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((text, index) => cell("th", text, index)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text, index) => cell("td", text, index)))))));
}

function processTable(processes) {
  return table(["Process", "User", "Memory"], processes.map((each) =>
    [`${each.pid} ${each.name ?? ""}${each.is_ours ? " (this server)" : ""}`, each.user ?? NONE, bytes(each.used_bytes)]));
}

const LIMITS = { memory: "memory", max_running: "--max-running", context: "the context" };

function half(section) {
  section.classList.add("half");
  return section;
}

function concurrencyPanel(rows) {
  return half(panel("Requests at a time", "of one length", table(["Prompt + output, tokens", "Requests", "Limited by"],
    rows.map((each) => [`${count(each.prompt_tokens)} + ${count(each.output_tokens)}`, count(each.requests), LIMITS[each.limited_by]]))));
}

function decodePanel(rows) {
  return half(panel("A decode step at best", "what memory and compute allow", table(
    ["Requests", "Context each", "Bandwidth", "Compute", "Step", "Tokens/s"],
    rows.map((each) => [count(each.batch), count(each.context), duration(each.bandwidth_s), duration(each.compute_s),
      duration(each.floor_s), short(each.tokens_per_s)]))));
}
