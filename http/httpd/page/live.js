// What the server does now: a reading of /live each second, while somebody looks.

const READ_MS = 1000;
const TREE_MS = 2000;

const live = { readings: [], charts: null, hasTree: true, treeAt: 0, gpus: -1 };

const used = (tier) => (tier ? (tier.total_tokens ? (tier.used_tokens / tier.total_tokens) * 100 : 0) : null);
const cached = (tier) => (tier ? (tier.total_tokens ? ((tier.used_tokens + tier.cached_tokens) / tier.total_tokens) * 100 : 0) : null);
const percent = (value) => (known(value) ? `${Math.round(value)} %` : NONE);

const quantiles = (title, name) => ({
  title, format: duration,
  series: ["p50", "p90", "p99"].map((each) => ({ name: each, of: (reading) => reading.latency[name][each] })),
});

function chartsFor(reading) {
  const charts = [
    { title: "Throughput", unit: "tokens/s", series: [
      { name: "out", of: (r) => r.throughput.output_tokens, area: true },
      { name: "in", of: (r) => r.throughput.prompt_tokens - r.throughput.cached_tokens },
      { name: "cached", of: (r) => r.throughput.cached_tokens },
    ] },
    quantiles("Time to first token", "ttft"),
    quantiles("Time between tokens", "itl"),
    quantiles("Time in the queue", "queue"),
    { title: "Requests", series: [
      { name: "running", of: (r) => r.load.running, area: true },
      { name: "waiting", of: (r) => r.load.waiting + r.load.encoding },
    ], format: count },
    { title: "KV cache", format: percent, most: 100, series: [
      { name: "kept", of: (r) => cached(r.kv), area: true },
      { name: "in use", of: (r) => used(r.kv), area: true },
      ...(reading.host_kv ? [{ name: "host", of: (r) => cached(r.host_kv) }] : []),
    ] },
  ];
  reading.gpus.slice(0, 4).forEach((gpu, index) => {
    const activity = (r) => r.gpus[index]?.activity;
    const whole = gpu.activity.memory?.total_bytes;
    const name = reading.gpus.length > 1 ? `GPU ${gpu.index}` : "GPU";
    charts.push(
      { title: `${name} memory`, format: bytes, most: whole ?? null, series: [{ name: "used", of: (r) => activity(r)?.memory?.used_bytes ?? null, area: true }] },
      { title: `${name} power`, format: (w) => (known(w) ? `${Math.round(w)} W` : NONE), most: gpu.activity.power_limit_w ?? null,
        series: [{ name: "now", of: (r) => activity(r)?.power_w ?? null, area: true }] },
    );
  });
  if (!reading.gpus.length) {
    charts.push({ title: "Step", format: duration, series: ["p50", "p99"].map((name) => ({ name, of: (r) => r.steps?.step_s[name] ?? null })) });
    charts.push({ title: "Host memory", format: bytes, series: [{ name: "available", of: (r) => r.memory_available_bytes, area: true }] });
  }
  return charts.map((each) => new Chart(each));
}

async function readLive() {
  if (document.hidden) return;
  let reading;
  try {
    reading = await askJson("/live");
  } catch (error) {
    showAway(error);
    return;
  }
  if (reading.gpus.length !== live.gpus || live.charts === null) {
    live.gpus = reading.gpus.length;
    live.charts = chartsFor(reading);
    byId("charts").replaceChildren(...live.charts.map((chart) => chart.element));
  }
  live.readings = [...live.readings, reading].slice(-KEPT);
  byId("live-absent").hidden = true;
  showGlance(reading);
  if (currentView() === "live") {
    for (const chart of live.charts) chart.show(live.readings);
    showWarnings(reading.warnings);
    showRequests(reading);
    if (reading.state === "ready") await readTree();
  }
}

function showAway(error) {
  const refused = error instanceof Refused;
  showState(refused ? (error.status === 401 ? "locked" : "ready") : "away");
  byId("glance").hidden = true;
  const absent = byId("live-absent");
  absent.hidden = live.readings.length > 0 && !refused;
  absent.textContent = refused ? error.message : "The server cannot be reached.";
}

const STATES = { away: "not reached", locked: "key needed" };

function showState(state) {
  byId("state").textContent = STATES[state] ?? state;
  byId("state-dot").className = `dot ${state === "locked" ? "away" : state}`;
}

function showGlance(reading) {
  showState(reading.state);
  if (reading.model) byId("welcome-model").textContent = reading.model;
  byId("glance").hidden = false;
  byId("glance-rate").textContent = short(reading.throughput.output_tokens);
  byId("glance-running").textContent = count(reading.load.running);
  byId("glance-waiting").textContent = count(reading.load.waiting + reading.load.encoding);
  byId("glance-kv").textContent = percent(used(reading.kv));
}

function showWarnings(warnings) {
  const shown = warnings.map((each) => make("p", { class: "warning" }, each.message));
  const box = byId("warnings");
  const told = (elements) => Array.from(elements, (each) => each.textContent).join("\n");
  if (told(shown) !== told(box.children)) box.replaceChildren(...shown); // else it would be read out again
}

function showRequests(reading) {
  const rows = reading.requests.map((each) => {
    const done = each.max_output_tokens ? each.output_tokens / each.max_output_tokens : 0;
    const bar = make("i");
    bar.style.width = `${Math.min(100, done * 100)}%`;
    return make("tr", {},
      make("td", {}, make("code", {}, each.id ?? each.request_id ?? "not named yet")),
      make("td", {}, make("span", { class: `phase ${each.phase}` }, each.phase)),
      make("td", { class: "number" }, duration(each.age_s)),
      make("td", { class: "number" }, count(each.prompt_tokens)),
      make("td", { class: "number" }, share(each.cached_tokens, each.prompt_tokens)),
      make("td", {}, make("span", { class: "meter", "aria-hidden": "true" }, bar), `${count(each.output_tokens)} of ${count(each.max_output_tokens)}`));
  });
  const none = make("tr", {}, make("td", { class: "empty", colspan: "6" }, "Nobody asks anything."));
  byId("requests").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
  const more = reading.load.alive - rows.length;
  const wait = reading.load.start_estimate_s;
  byId("requests-note").textContent = [
    `${count(reading.load.running)} of ${count(reading.load.max_running)} places taken`,
    wait ? `a new one would start in about ${duration(wait)}` : "a new one would start at once",
    ...(more > 0 && rows.length ? [`${count(more)} more not listed`] : []),
  ].join(" · ");
}
