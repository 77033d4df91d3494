// What this server is and does. All that it shows is set as text: names, labels and reasons are others' words.
"use strict";
(() => {
  const POLL_MS = 1000, RETRY_MS = 2000, TIMEOUT_MS = 10000;
  const RATE_S = 10, HISTORY_S = 60; // over how long rates are taken, and how long the curve is
  const MANY = 12; // models from which on there is a filter
  const SHOWN = 20; // findings of a tried image
  const METHODS = { classification: "classify", detection: "detect", segmentation: "segment", embedding: "embed", sequence: "transcribe", keypoints: "locate", image: "transform" };
  const OPTIONS = { classify: { top_k: "5" }, detect: { min_score: "0.3" }, segment: { pixel_counts: "true" }, embed: {}, transcribe: {}, locate: { min_score: "0.3" }, transform: {} };
  const DRAWN = new Set(["detect", "segment", "locate", "transform"]);
  const STAGES = ["decode", "queue", "gather", "execute", "encode"];
  const SERVERS = new Set(["INTERNAL", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"]); // whose fault it was
  const TONES = { READY: "good", FAILED: "bad", LOADING: "open", COMPILING: "open", DRAINING: "open" };

  const $ = (id) => document.getElementById(id);
  const make = (tag, className = "", ...children) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...children);
    return element;
  };
  const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const attribute = (element, name, value) => {
    if (value === null) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  };

  // Numbers in words.
  const NONE = "–";
  const clockTime = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const number = (value, digits = 3) => value === null || !Number.isFinite(value) ? NONE
    : value >= 1000 ? integer.format(value)
    : value === 0 ? "0" : Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 4 });
  const hundredths = (value) => number(Math.round(value * 100) / 100);
  const unbroken = (text) => text.replaceAll(" ", "\u00a0");
  const ms = (seconds) => seconds === null || seconds === undefined ? NONE : number(seconds * 1000);
  const about = (seconds) => seconds === null ? NONE : number(Number((seconds * 1000).toPrecision(2))); // from a histogram
  const percent = (share) => share === null ? NONE : share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
  const bytes = (count) => count === null ? NONE : count >= 2 ** 30 ? `${number(count / 2 ** 30)} GiB` : count >= 2 ** 20 ? `${integer.format(count / 2 ** 20)} MiB` : `${integer.format(Math.ceil(count / 1024))} KiB`;
  const span = (seconds) => seconds < 120 ? `${Math.floor(seconds)} s` : seconds < 7200 ? `${Math.floor(seconds / 60)} min` : seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
  const clock = (at_s) => clockTime.format(at_s * 1000);
  const count = (many, one, more = `${one}s`) => `${integer.format(many)} ${many === 1 ? one : more}`;

  // Histograms: observations up to each bound and above the one before.
  const sum = (counts) => counts.reduce((total, each) => total + each, 0);
  const add = (one, other) => Array.from({ length: Math.max(one.length, other.length) }, (_, i) => (one[i] ?? 0) + (other[i] ?? 0));
  const since = (now, then) => ({
    counts: now.counts.map((each, i) => Math.max(0, each - (then?.counts[i] ?? 0))),
    total_s: Math.max(0, now.total_s - (then?.total_s ?? 0)),
  });
  const quantile = (counts, bounds, share) => {
    let left = sum(counts) * share;
    if (!left) return null;
    for (let i = 0; i < counts.length; i += 1) {
      if (left <= counts[i]) {
        const low = i ? bounds[i - 1] : 0;
        return i < bounds.length ? low + (bounds[i] - low) * (left / counts[i]) : low;
      }
      left -= counts[i];
    }
    return bounds.at(-1);
  };

  // Rows are filled in place, so that what is focused or selected stays so.
  const cells = (row, values, labels) => {
    values.forEach((value, i) => {
      const { text = "", className = "", share = null, tone = "", progress = null } = typeof value === "object" ? value : { text: value };
      let cell = row.children[i];
      const tag = i === 0 ? "th" : "td";
      if (!cell) {
        cell = make(tag);
        if (i === 0) cell.scope = "row";
        else if (labels[i]) cell.dataset.label = labels[i];
        row.append(cell);
      }
      const kind = `${className}`;
      if (cell.className !== kind) cell.className = kind;
      if (share === null && !tone) { set(cell, text); return; }
      if (!cell.firstElementChild) cell.append(...(tone ? [make("span")] : [make("span", "share", make("span")), make("span")]));
      if (tone) {
        cell.firstElementChild.className = `state ${tone}`;
        set(cell.firstElementChild, text);
        let bar = cell.querySelector("progress");
        if (progress === null) bar?.remove();
        else {
          if (!bar) { bar = make("progress"); cell.append(bar); }
          [bar.max, bar.value] = [progress[1], progress[0]];
          attribute(bar, "aria-label", `${progress[0]} of ${progress[1]} programs`);
        }
      } else {
        cell.firstElementChild.firstElementChild.style.inlineSize = `${Math.min(100, share * 100)}%`;
        set(cell.lastElementChild, text);
      }
    });
  };
  const fill = (id, rows, none = "") => {
    const body = $(id);
    const labels = [...body.closest("table").querySelectorAll("thead th")].map((head) => head.textContent);
    if (!rows.length) {
      const row = make("tr", "", make("td", "none", none));
      row.firstElementChild.colSpan = labels.length;
      if (body.textContent !== none) body.replaceChildren(row);
      return;
    }
    if (body.querySelector(".none[colspan]")) body.replaceChildren();
    while (body.children.length > rows.length) body.lastElementChild.remove();
    while (body.children.length < rows.length) body.append(make("tr"));
    rows.forEach((row, i) => cells(body.children[i], row, labels));
  };
  const right = (text) => ({ text, className: "number" });

  // The server.
  let key = ""; // kept here and nowhere else
  const ask = async (path, options = {}) => {
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS), ...options, headers });
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(said.error ?? `status ${answer.status}`), { status: answer.status });
  };

  // Looks at the server, the newest last, by which rates are taken.
  let looks = [];
  const then = (seconds) => {
    const newest = looks.at(-1).clock_s;
    return looks.find((look) => look.clock_s >= newest - seconds - 0.5 && look !== looks.at(-1)) ?? null;
  };
  const remember = (look) => {
    const last = looks.at(-1);
    if (last && (look.clock_s < last.clock_s || look.up_s < last.up_s)) looks = []; // another process
    if (last?.clock_s === look.clock_s) looks.pop();
    look.by_key = new Map(look.models.map((model) => [keyOf(model), model]));
    looks.push(look);
    while (looks[0].clock_s < look.clock_s - HISTORY_S - 1) looks.shift();
  };
  const keyOf = (model) => `${model.name}\n${model.version}`;
  const grown = (now, before, read) => now.models.reduce((total, model) => {
    const was = before.by_key.get(keyOf(model));
    return total + Math.max(0, read(model) - (was ? read(was) : 0));
  }, 0);

  // Tiles.
  const tiles = new Map();
  const tile = (name, value, unit = "", note = "", { isWide = false, isAlarm = false } = {}) => {
    let found = tiles.get(name);
    if (!found) {
      const box = make("div", isWide ? "tile wide" : "tile", make("dt", "", name));
      found = { box, value: document.createTextNode(""), unit: make("small"), note: make("dd", "note") };
      box.append(make("dd", "", found.value, found.unit), found.note);
      $("tiles").append(box);
      tiles.set(name, found);
    }
    if (found.value.data !== value) found.value.data = value;
    set(found.unit, unit ? ` ${unit}` : "");
    set(found.note, note);
    found.box.classList.toggle("alarm", isAlarm);
    return found.box;
  };
  const SVG = "http://www.w3.org/2000/svg";
  const curve = (box, values) => {
    let svg = box.querySelector("svg");
    if (!svg) {
      svg = document.createElementNS(SVG, "svg");
      attribute(svg, "aria-hidden", "true");
      attribute(svg, "viewBox", `0 0 ${HISTORY_S} 20`);
      attribute(svg, "preserveAspectRatio", "none");
      svg.append(document.createElementNS(SVG, "path"), document.createElementNS(SVG, "polyline"));
      box.append(svg);
    }
    const most = Math.max(1e-9, ...values.map(([, value]) => value));
    const points = values.map(([ago, value]) => `${(HISTORY_S - ago).toFixed(2)},${(20 - 19 * (value / most)).toFixed(2)}`);
    attribute(svg.lastElementChild, "points", points.join(" "));
    attribute(svg.firstElementChild, "d", points.length < 2 ? "" : `M${points[0].split(",")[0]},20 L${points.join(" L")} L${HISTORY_S},20 Z`);
  };

  // What each process has used since `before`, by its role; one that has started since then, since its start.
  const coresOf = (look, before, seconds) => {
    if (!before) return [];
    const was = new Map(before.processes.map((process) => [process.pid, process.cpu_s]));
    return look.processes.map(({ pid, role, cpu_s }) => [role, Math.max(0, cpu_s - (was.get(pid) ?? 0)) / seconds]);
  };

  const showNow = (look) => {
    const before = then(RATE_S);
    const seconds = before ? look.clock_s - before.clock_s : 0;
    const rate = (read) => before ? grown(look, before, read) / seconds : null;
    const history = looks.slice(1).map((one, i) => {
      const took = one.clock_s - looks[i].clock_s;
      return [look.clock_s - one.clock_s, grown(one, looks[i], (model) => model.images) / took];
    });
    const latency = look.models.reduce((counts, model) =>
      add(counts, since(model.total, before?.by_key.get(keyOf(model))?.total).counts), []);
    const waiting = look.models.reduce((total, model) => total + (model.waiting_images ?? 0), 0);
    const work = look.models.reduce((total, model) => total + (model.queued_work_s ?? 0), 0);
    const busy = before ? (look.lanes.busy_s - before.lanes.busy_s) / seconds / look.lanes.count : null;
    const cores = coresOf(look, before, seconds);
    const busiest = [...cores].sort(([, one], [, other]) => other - one)[0];
    const memory = look.processes.reduce((total, process) => total + process.resident_bytes, 0);
    curve(tile("Images/s", number(rate((model) => model.images)), "", `last ${RATE_S} s`, { isWide: true }), history);
    const failed = rate((model) => model.failed);
    tile("Requests/s", number(rate((model) => model.requests)), "", failed ? `${number(failed)}/s failed` : "none failed", { isAlarm: Boolean(failed) });
    const p99 = before && quantile(latency, look.bounds_s, 0.99);
    tile("Latency, p50", before ? about(quantile(latency, look.bounds_s, 0.5)) : NONE, "ms", `p99 ${p99 === null ? NONE : about(p99)} ms`);
    tile("Waiting", number(waiting), waiting === 1 ? "image" : "images", `${ms(work)} ms of work`);
    tile("Lanes busy", percent(busy), "", `${count(look.lanes.count, "lane")}, ${look.in_flight_requests} in flight`);
    tile("Processor", before ? hundredths(sum(cores.map(([, used]) => used))) : NONE, "cores",
      `of ${look.cores}; memory ${unbroken(bytes(memory))}`
      + (cores.length > 1 ? `; most: ${unbroken(`${busiest[0]}, ${hundredths(busiest[1])}`)}` : ""));
    if (look.gpus.length) {
      const total = (name) => look.gpus.reduce((all, gpu) => all + (gpu[name] ?? 0), 0);
      const busiest = Math.max(...look.gpus.map((gpu) => gpu.utilization_ratio ?? 0));
      tile(look.gpus.length > 1 ? `${look.gpus.length} GPUs busy` : "GPU busy", percent(total("utilization_ratio") / look.gpus.length),
        look.gpus.length > 1 ? `most ${percent(busiest)}` : "", `${bytes(total("memory_used_bytes"))} of ${bytes(total("memory_size_bytes"))}`);
    }
    tile("Late compiles", number(look.compiled_while_serving), "", look.is_watched ? "while serving" : "not watched", { isAlarm: look.compiled_while_serving > 0 });
  };

  const showServer = (look) => {
    set($("version"), look.version);
    const states = look.models.map((model) => model.state);
    const ready = states.filter((state) => state === "READY").length;
    const isComing = states.some((state) => state === "LOADING" || state === "COMPILING");
    const [words, tone] = look.is_ready ? ["ready", "good"] : isComing ? [`starting, ${ready} of ${states.length} models ready`, "open"] : ["not ready", "bad"];
    set($("state"), words);
    $("state").className = `state ${tone}`;
    document.title = `xlaserve: ${look.is_ready ? "ready" : isComing ? "starting" : "not ready"}`;
    const { device, lanes, addresses } = look;
    const name = `${device.count > 1 ? `${device.count} × ` : ""}${device.name}`;
    const ports = [["gRPC", addresses.grpc], ["HTTP", addresses.http], ["metrics", addresses.metrics]]
      .filter(([, address]) => address).map(([protocol, address]) => `${protocol} ${address}`);
    set($("what"), [name, `${count(lanes.count, "lane")}`, look.tensorflow ? `TensorFlow ${look.tensorflow}` : "", `up ${span(look.up_s)}`, ...ports].filter(Boolean).join(" · "));
    set($("profile-command"), `xlaserve profile --target ${addresses.grpc}`);
    set($("metrics-url"), new URL("metrics", document.baseURI).href);
    $("links-need-key").hidden = !key;
  };

  const stateOf = (model) => {
    const isGrowing = model.programs < model.programs_total && ["LOADING", "COMPILING", "READY"].includes(model.state);
    const hasBegun = isGrowing && (model.state === "COMPILING" || model.programs > 0);
    return {
      text: `${model.state.toLowerCase()}${hasBegun ? ` ${model.programs}/${model.programs_total}` : ""}`,
      tone: TONES[model.state] ?? "quiet",
      className: "is-state",
      progress: hasBegun ? [model.programs, model.programs_total] : null,
    };
  };

  let selected = "";
  const showModels = (look) => {
    const before = then(RATE_S);
    const wanted = $("filter").value.trim().toLowerCase();
    const shown = look.models.filter((model) => !wanted || `${model.name} ${model.state} ${model.task}`.toLowerCase().includes(wanted));
    $("filter-label").hidden = look.models.length < MANY;
    set($("models-count"), look.models.length < 2 ? "" : shown.length < look.models.length ? `${shown.length} of ${look.models.length}` : `${look.models.length}`);
    fill("models-rows", shown.map((model) => {
      const was = before?.by_key.get(keyOf(model));
      const latency = was ? since(model.total, was.total).counts : [];
      return [
        "",
        stateOf(model),
        right(was ? number(Math.max(0, model.images - was.images) / (look.clock_s - before.clock_s)) : NONE),
        right(about(quantile(latency, look.bounds_s, 0.5))),
        right(about(quantile(latency, look.bounds_s, 0.99))),
        right(model.waiting_images === undefined ? NONE : number(model.waiting_images)),
        right(number(model.failed)),
      ];
    }), look.models.length ? "No model of that name." : "This server has no models, or none that you may use.");
    shown.forEach((model, i) => {
      const head = $("models-rows").children[i].firstElementChild;
      let link = head.querySelector("a");
      if (!link) { link = make("a"); head.replaceChildren(link, " ", make("small")); }
      set(link, model.name);
      attribute(link, "href", `#${hashOf(model)}`);
      attribute(link, "aria-current", keyOf(model) === selected ? "true" : null);
      set(head.lastElementChild, [`version ${model.version}`, model.task, model.warnings ? count(model.warnings, "warning") : ""].filter(Boolean).join(", "));
    });
  };

  // One model.
  const hashOf = (model) => `${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
  let details = [];
  const choose = (look) => {
    const ofHash = look.models.find((model) => `#${hashOf(model)}` === location.hash);
    const kept = look.models.find((model) => keyOf(model) === selected);
    const model = ofHash ?? kept ?? look.models.find((one) => one.state === "READY") ?? look.models[0];
    const chosen = model ? keyOf(model) : "";
    if (chosen !== selected) {
      selected = chosen;
      details = [];
      $("model").hidden = true;
      untry();
    }
    return model ?? null;
  };
  const showModel = (model, bounds) => {
    const now = performance.now() / 1000;
    details.push({ at: now, stages: model.stages, total: model.total });
    while (details[0].at < now - HISTORY_S) details.shift();
    $("model").hidden = false;
    set($("model-title"), `${model.name}, version ${model.version}`);
    const weights = model.weights === model.source ? "" : model.weights;
    set($("model-what"), [model.task, model.source, weights, model.precision, isOfOneImage(model) ? model.pixels : count(model.inputs.length, "input"), `fit ${model.fit}`, model.resize && `resize ${model.resize}`, model.decode && `decode ${model.decode}`, model.examples && `examples ${model.examples}`, model.task_reason && `${model.task} as ${model.task_reason}`].filter((word) => word && word !== "fit ").join(" · "));
    $("model-reason").hidden = !model.reason;
    set($("model-reason"), model.reason);
    $("model-warnings").hidden = !model.warnings.length;
    if ($("model-warnings").children.length !== model.warnings.length) $("model-warnings").replaceChildren(...model.warnings.map(() => make("li")));
    model.warnings.forEach((warning, i) => set($("model-warnings").children[i], warning));
    showBuckets(model);
    showStages(model, bounds);
    showLedger(model);
    showModes(model);
    showInputs(model);
  };
  // Programs that `auto` has measured and that nobody may ask for get no batch.
  const served = (model) => model.buckets.filter((bucket) => bucket.batches || model.modes.includes(bucket.mode));
  const showBuckets = (model) => {
    const batches = model.buckets.reduce((total, bucket) => total + bucket.batches, 0);
    fill("buckets-rows", served(model).map((bucket) => {
      const share = batches ? bucket.batches / batches : 0;
      return [
        bucket.bucket,
        { text: bucket.mode === bucket.runs_in ? bucket.mode : `${bucket.mode}: ${bucket.runs_in}`, className: "tight" },
        right(ms(bucket.run?.alone_s)),
        right(ms(bucket.run?.loaded_s)),
        right(ms(bucket.turn?.loaded_s)),
        right(number(bucket.batches)),
        { text: percent(share), share, className: "tight" },
      ];
    }), model.state === "FAILED" ? "It failed." : "None serves yet.");
    const rows = model.images + model.padded_rows;
    set($("padding"), model.padded_rows ? `${percent(model.padded_rows / rows)} of all rows were padding.` : "");
  };
  const showStages = (model, bounds) => {
    const read = (look) => ({ ...look.stages, total: look.total });
    const recent = (name) => since(read(model)[name], read(details[0])[name]);
    const isRecent = sum(recent("total").counts) > 0;
    const found = Object.fromEntries([...STAGES, "total"].map((name) => [name, isRecent ? recent(name) : read(model)[name]]));
    set($("stages-when"), isRecent ? "in the last minute" : "since the server was started");
    const mean = ({ counts, total_s }) => sum(counts) ? total_s / sum(counts) : null;
    const whole = STAGES.reduce((total, name) => total + (mean(found[name]) ?? 0), 0);
    fill("stages-rows", Object.entries(found).map(([name, histogram]) => [
      name,
      right(ms(mean(histogram))),
      right(about(quantile(histogram.counts, bounds, 0.5))),
      right(about(quantile(histogram.counts, bounds, 0.99))),
      name === "total" ? "" : { text: "", share: whole ? (mean(histogram) ?? 0) / whole : 0 },
    ]));
    STAGES.forEach((name, i) => $("stages-rows").children[i].querySelector(".share")?.classList.add("tinted", name));
  };
  const showLedger = (model) => {
    const took = model.ledger.reduce((total, entry) => total + entry.trace_s + entry.compile_s, 0);
    const cached = model.ledger.filter((entry) => entry.from_cache).length;
    set($("ledger-sum"), `${model.programs} of ${count(model.programs_total, "program")}, ${number(took)} s${cached ? `, ${cached} from the cache` : ""}`);
    if (!$("ledger").open) return;
    const used = new Set(served(model).map((bucket) => `${bucket.runs_in} ${bucket.bucket}`));
    const isLeft = (entry) => used.size > 0 && !used.has(`${entry.mode} ${entry.bucket}`);
    set($("ledger-about"), model.ledger.some(isLeft) ? "Programs with their mode in parentheses were measured and serve no requests." : "");
    fill("ledger-rows", model.ledger.map((entry) => [
      { text: clock(entry.at_s), className: "time" },
      entry.bucket,
      isLeft(entry) ? `(${entry.mode})` : entry.mode,
      `${entry.from_cache ? "cache" : "compiled"}${entry.in_background ? ", in the background" : ""}`,
      right(number(entry.trace_s)),
      right(number(entry.compile_s)),
      right(ms(entry.run.alone_s)),
      entry.fault || (entry.difference === null ? "not compared" : entry.difference === 0 ? "equal" : `differs by ${entry.difference.toExponential(1)} at most`),
    ]), "Nothing was compiled yet.");
  };
  const showErrors = (look) => {
    set($("errors-count"), look.failures.length ? `${look.failures.length}, the newest first` : "");
    const newest = look.failures[0];
    const seen = newest ? `${newest.at_s} ${newest.request_id} ${look.failures.length}` : "none";
    if ($("errors").dataset.seen === seen) return; // what is selected stays so
    $("errors").dataset.seen = seen;
    $("errors").replaceChildren(...look.failures.map((failure) => make("li", "",
      make("div", "bar-title",
        make("span", `state ${SERVERS.has(failure.status) ? "bad" : "quiet"}`, failure.status), make("strong", "", failure.model),
        make("span", "soft", failure.method), make("time", "soft", clock(failure.at_s))),
      make("p", "", failure.reason),
      make("p", "soft", `${failure.caller} `, make("code", "", failure.request_id)))));
    if (!newest) $("errors").append(make("li", "none", "None since the server was started."));
  };

  // What a screen reader says: changes, and no numbers.
  const announce = (look, isBack) => {
    const was = looks.at(-2);
    const changed = was ? look.models.filter((model) => was.by_key.get(keyOf(model))?.state !== model.state) : [];
    const said = [isBack ? "The server answers again." : ""];
    if (changed.length > 3) said.push(`${changed.length} models have changed their state.`);
    else said.push(...changed.map((model) => `${model.name} is ${model.state.toLowerCase()}.`));
    const text = said.filter(Boolean).join(" ");
    if (text) set($("announced"), text);
  };

  // Once a second, while somebody looks.
  let timer = 0, isAsking = false, lostAt = null;
  const later = (wait) => {
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, wait);
  };
  const needKey = (said) => {
    $("key-form").hidden = false;
    $("main").hidden = true;
    set($("state"), "");
    set($("connection"), said);
    $("key").focus();
  };
  const show = (look, model) => {
    $("key-form").hidden = true;
    $("main").hidden = false;
    document.body.classList.remove("stale");
    set($("connection"), "");
    remember(look);
    showServer(look);
    showNow(look);
    showErrors(look);
    announce(look, lostAt !== null);
    lostAt = null;
    choose(look);
    showModels(look);
    if (model && keyOf(model) === selected) showModel(model, look.bounds_s);
  };
  const poll = async () => {
    clearTimeout(timer);
    if (isAsking) return;
    isAsking = true;
    let wait = POLL_MS;
    try {
      const look = await (await ask("v1/status")).json();
      const chosen = choose(look);
      const path = chosen && `v1/status/models/${encodeURIComponent(chosen.name)}/versions/${encodeURIComponent(chosen.version)}`;
      // It may have been unloaded meanwhile.
      const model = path && await ask(path).then((answer) => answer.json()).catch((error) => error.status ? null : Promise.reject(error));
      show(look, model);
      if (chosen && keyOf(chosen) !== selected) wait = 0;
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        const said = key ? `${error.message}.` : "";
        key = "";
        needKey(said);
        return; // until there is another key
      }
      lostAt ??= new Date();
      set($("connection"), `No answer from the server since ${clockTime.format(lostAt)}. Trying again.`);
      set($("state"), "");
      document.body.classList.add("stale");
      wait = RETRY_MS;
    } finally {
      isAsking = false;
    }
    later(wait);
  };
  document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else poll(); });
  addEventListener("hashchange", () => { if (looks.length) { choose(looks.at(-1)); showModels(looks.at(-1)); } poll(); });
  $("filter").addEventListener("input", () => showModels(looks.at(-1)));
  $("ledger").addEventListener("toggle", poll);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    $("key").value = "";
    poll();
  });

  // An image is tried with the model that is shown.
  let tried = null; // what was last tried, and how to stop it
  const urls = [];
  const showPicture = (blob) => {
    const url = URL.createObjectURL(blob);
    urls.push(url);
    $("picture").src = url;
    while (urls.length > 1) URL.revokeObjectURL(urls.shift());
  };
  const untry = () => {
    tried?.stop.abort();
    tried = null;
    $("tried").hidden = true;
    $("mode-label").hidden = true;
  };
  const showModes = (model) => {
    const options = $("mode").options;
    if (model.modes.join() === [...options].map((option) => option.value).join()) { $("mode-label").hidden = model.modes.length < 2; return; }
    $("mode").replaceChildren(...model.modes.map((mode) => Object.assign(make("option", "", mode), { value: mode })));
    $("mode").value = model.mode;
    $("mode-label").hidden = model.modes.length < 2;
  };
  const findings = {
    classify: ({ classifications: [{ categories }] }) => [
      categories.length ? `${categories[0].label}, score ${number(categories[0].score)}` : "No class",
      categories.map(({ label, score }) => [label, score, number(score)]),
    ],
    detect: ({ results: [{ detections }] }) => [
      `${count(detections.length, "object")} with a score of ${OPTIONS.detect.min_score} or more`,
      detections.map(({ label, score }) => [label, score, number(score)]),
    ],
    segment: ({ maps: [{ counts, height, width }] }) => [
      `${count(counts.length, "class", "classes")} in ${width} × ${height} pixels`,
      counts.sort((one, other) => other.pixels - one.pixels).map(({ label, pixels }) => [label, pixels / (height * width), percent(pixels / (height * width))]),
    ],
    embed: ({ embeddings: [{ values }] }) => [
      `${count(values.length, "number")}, length ${number(Math.hypot(...values))}`,
      [[`${values.slice(0, 8).map((value) => number(value)).join(", ")}${values.length > 8 ? ", …" : ""}`, null, ""]],
    ],
    transcribe: ({ transcriptions: [{ text, score, categories }] }) => [
      categories.length ? `${text}, score ${number(score)}` : "Nothing",
      categories.map(({ label, score: own }) => [label, own, number(own)]),
    ],
    locate: ({ results: [{ keypoints }] }) => [
      count(keypoints.length, "keypoint"),
      keypoints.map(({ label, score, x, y }) => [label, score, `${score === null ? "" : `${number(score)} at `}${number(x)}, ${number(y)}`]),
    ],
    transform: ({ images: [{ height, width }] }) => [`An image of ${width} × ${height} pixels`, []],
  };
  const showFindings = (title, rows) => {
    $("found").classList.remove("failed");
    set($("found"), title);
    $("findings").replaceChildren(...rows.slice(0, SHOWN).map(([label, share, figure]) => {
      const item = make("li", "", make("span", "label", label));
      if (share !== null) {
        const bar = make("span", "share", make("span"));
        bar.firstElementChild.style.inlineSize = `${Math.min(1, Math.max(0, share)) * 100}%`;
        item.append(bar);
      }
      item.append(make("span", "soft", figure));
      return item;
    }));
    if (rows.length > SHOWN) $("findings").append(make("li", "soft", `and ${rows.length - SHOWN} more`));
  };
  const showTook = (timings, trip_s) => {
    $("took").hidden = !timings;
    if (!timings) return;
    const known = STAGES.map((stage) => [stage, timings[`${stage}_s`]]);
    const parts = [...known, ["rest", Math.max(0, timings.total_s - known.reduce((total, [, seconds]) => total + seconds, 0))]];
    $("took-bar").replaceChildren(...parts.map(([stage, seconds]) => {
      const part = make("span", stage);
      part.style.inlineSize = `${(seconds / timings.total_s) * 100}%`;
      return part;
    }));
    const row = (className, name, seconds) => make("div", className, make("dt", "", name), make("dd", "", `${ms(seconds)} ms`));
    $("took-stages").replaceChildren(...parts.map(([stage, seconds]) => row(stage, stage, seconds)),
      row("total", "in the server", timings.total_s), row("total", "seen from here", trip_s));
  };
  // What is tried next ends what was tried before; `run` shows what it gets, unless it was ended.
  const attempt = async (again, run) => {
    tried?.stop.abort();
    const own = tried = { again, stop: new AbortController() };
    const isShown = () => tried === own;
    $("tried").hidden = false;
    $("tried").classList.add("busy");
    attribute($("tried"), "aria-busy", "true");
    try {
      await run(own.stop.signal, isShown);
    } catch (error) {
      if (!isShown()) return;
      showFindings(error.status || !(error instanceof TypeError) ? error.message : "The server does not answer.", []);
      $("found").classList.add("failed");
      showTook(null);
    } finally {
      if (isShown()) {
        $("tried").classList.remove("busy");
        attribute($("tried"), "aria-busy", null);
      }
    }
  };
  const tryImage = (blob, name) => {
    const model = looks.at(-1)?.by_key.get(selected);
    if (!model || !blob) return;
    if (!$("inputs").hidden) { fillInput(blob); return; }
    $("figure").hidden = false;
    showPicture(blob);
    $("picture").alt = `The image ${name}`;
    set($("caption"), `${name}, ${bytes(blob.size)}`);
    attempt(() => tryImage(blob, name), async (signal, isShown) => {
      const method = METHODS[model.task];
      if (!method && model.task) throw new Error(`v2/models/${model.name}/infer answers with its tensors; nothing is drawn of them`);
      if (!method) throw new Error(`${model.name} is not ready`);
      const query = new URLSearchParams({ ...OPTIONS[method], ...($("mode").value ? { mode: $("mode").value } : {}) });
      const path = `v1/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}:${method}?${query}`;
      const request = (accept) => ask(path, {
        method: "POST", body: blob, signal,
        headers: { accept, "content-type": blob.type || "application/octet-stream" },
      });
      const began = performance.now();
      const answer = await (await request("application/json")).json();
      const trip_s = (performance.now() - began) / 1000;
      const drawn = DRAWN.has(method) ? await (await request("image/png")).blob() : null;
      if (!isShown()) return;
      const [title, rows] = findings[method](answer);
      showFindings(title, rows);
      showTook(answer.timings, trip_s);
      if (drawn) {
        showPicture(drawn);
        $("picture").alt = method === "transform" ? `What ${model.name} makes of the image ${name}` : `The image ${name} with what was found drawn in: ${title}`;
      }
    });
  };

  // A model of several inputs, or without images, has a field for each input.
  const isOfOneImage = ({ inputs }) => !inputs.length || (inputs.length === 1 && inputs[0].is_image);
  const sides = (shape) => `[${shape.map((side, i) => i ? (side < 0 ? "any" : side) : "n").join(", ")}]`;
  const showInputs = (model) => {
    const hasForm = !isOfOneImage(model);
    set($("try-title"), hasForm ? `Try ${model.name}` : `Try an image with ${model.name}`);
    $("drop").hidden = hasForm;
    $("inputs").hidden = !hasForm;
    const holder = hasForm ? $("inputs-end") : $("drop");
    if ($("mode-label").parentElement !== holder) holder.append($("mode-label"));
    const shown = JSON.stringify([keyOf(model), model.inputs]);
    if (!hasForm || $("inputs").dataset.shown === shown) return; // what is chosen stays so
    $("inputs").dataset.shown = shown;
    $("inputs-fields").replaceChildren(...model.inputs.map((input) => {
      const field = make("input");
      Object.assign(field, input.is_image ? { type: "file", accept: "image/*" } : { type: "text", placeholder: input.shape.length > 1 ? "[0.5, 2, ...]" : "3.5", autocomplete: "off", spellcheck: false });
      field.required = true;
      const label = make("label", "", make("strong", "", input.name), " ", make("span", "soft", `${input.is_image ? "image" : input.datatype} ${sides(input.shape)}`), field);
      return Object.assign(label, { field, input });
    }));
  };
  const fillInput = (file) => {
    const fields = [...$("inputs-fields").children].filter(({ input }) => input.is_image).map(({ field }) => field);
    const field = fields.find(({ files }) => !files.length) ?? fields[0];
    if (!field) return;
    const transfer = new DataTransfer();
    transfer.items.add(file instanceof File ? file : new File([file], "image"));
    field.files = transfer.files;
  };
  const base64 = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} can't be read`));
    reader.readAsDataURL(file);
  });
  const tensorOf = async ({ field, input: { name, datatype, shape, is_image } }) => {
    if (is_image) return { name, datatype: "BYTES", shape: [1], data: [await base64(field.files[0])] };
    let values;
    try { values = [JSON.parse(field.value)].flat(Infinity); } catch { throw new Error(`${name}: expected numbers in JSON, such as 3.5 or [1, 2], got ${field.value}`); }
    const row = shape.slice(1), size = row.reduce((product, side) => product * side, 1);
    if (values.length !== size) throw new Error(`${name}: expected ${count(size, "number")}, got ${values.length}`);
    return { name, datatype, shape: [1, ...row], data: values };
  };
  const shownValues = (values) => `${values.slice(0, 8).map((value) => typeof value === "number" ? number(value) : String(value)).join(", ")}${values.length > 8 ? ", …" : ""}`;
  const tryInputs = () => {
    const model = looks.at(-1)?.by_key.get(selected);
    if (!model || !$("inputs").reportValidity()) return;
    $("figure").hidden = true;
    attempt(tryInputs, async (signal, isShown) => {
      const inputs = await Promise.all([...$("inputs-fields").children].map(tensorOf));
      const path = `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}/infer`;
      const parameters = $("mode").value ? { mode: $("mode").value } : {};
      const began = performance.now();
      const answer = await (await ask(path, {
        method: "POST", body: JSON.stringify({ inputs, parameters }), signal, headers: { "content-type": "application/json" },
      })).json();
      if (!isShown()) return;
      showFindings(count(answer.outputs.length, "output"), answer.outputs.map(({ name, datatype, shape, data }) =>
        [`${name} ${datatype} [${shape.join(", ")}]`, null, shownValues(data.flat(Infinity))]));
      showTook(answer.parameters?.total_s === undefined ? null : answer.parameters, (performance.now() - began) / 1000);
    });
  };
  $("inputs").addEventListener("submit", (event) => { event.preventDefault(); tryInputs(); });
  const imageOf = (transfer) => [...(transfer?.files ?? [])][0] ?? null;
  $("file").addEventListener("change", () => { const [file] = $("file").files; if (file) tryImage(file, file.name); $("file").value = ""; });
  $("mode").addEventListener("change", () => { tried?.again(); });
  for (const button of document.querySelectorAll("[data-sample]")) {
    button.addEventListener("click", async () => tryImage(await (await fetch(button.dataset.sample)).blob(), button.dataset.sample.split("/").at(-1)));
  }
  document.addEventListener("paste", (event) => { const file = imageOf(event.clipboardData); if (file) tryImage(file, file.name); });
  // Anywhere: an image that misses the field would be opened in place of the page.
  let depth = 0;
  const over = (change) => { depth = Math.max(0, depth + change); $("drop").classList.toggle("over", depth > 0); };
  addEventListener("dragenter", () => over(1));
  addEventListener("dragleave", () => over(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    over(-depth);
    const file = imageOf(event.dataTransfer);
    if (file) tryImage(file, file.name);
  });
  $("picture").addEventListener("load", () => {
    $("picture").hidden = false;
    $("picture").classList.toggle("pixels", $("picture").naturalWidth <= 64);
  });
  $("picture").addEventListener("error", () => { $("picture").hidden = true; }); // it is no image

  poll();
})();
