"use strict";
(() => {
  const items = JSON.parse(document.getElementById("items").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const kinds = { image: "picture", video: "clip", audio: "sound" };

  // ---- light and dark: as the system has it, unless the reader chooses ----
  const themes = ["system", "light", "dark"];
  const themeButton = byId("theme");
  const remembered = () => { try { return localStorage.getItem("exeunt-theme"); } catch { return null; } };
  let theme = themes.includes(remembered()) ? remembered() : "system";
  const showTheme = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    themeButton.textContent = `Theme: ${theme}`;
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("exeunt-theme", theme); } catch { /* a page that may not remember */ }
    showTheme();
  });
  showTheme();

  // ---- the gallery: all cards exist once; filtering takes them out and puts them back ----
  const gallery = byId("gallery");
  // A thumbnail is decoded when its card comes near: a thousand at a time would take seconds.
  const near = "IntersectionObserver" in window ? new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      near.unobserve(entry.target);
      entry.target.src = items[entry.target.dataset.index].thumbnail;
    }
  }, { rootMargin: "600px" }) : null;

  const say = (item) => [
    item.status === "done" ? "" : item.status, kinds[item.type] || "", item.name,
    item.prompt.slice(0, 200), item.seed && `seed ${item.seed}`, item.cached ? "found in the store" : "",
  ].filter(Boolean).join(", ");

  const card = (item, index) => {
    const entry = make("li");
    const button = make("button", `card ${item.status}`);
    button.type = "button";
    button.tabIndex = -1;
    button.dataset.index = index;
    button.setAttribute("aria-label", say(item));
    const frame = make("span", "frame");
    if (item.thumbnail) {
      const image = make("img");
      image.alt = "";
      image.decoding = "async";
      image.dataset.index = index;
      if (near) near.observe(image); else image.src = item.thumbnail;
      frame.append(image);
    } else {
      frame.append(make("span", "why", item.error || kinds[item.type] || item.status));
    }
    const caption = make("span", "caption");
    const text = make("span", "text", item.prompt || item.name);
    text.dir = "auto";
    const small = make("span", "small");
    if (item.status !== "done") small.append(make("span", `badge ${item.status}`, item.status));
    if (item.cached) small.append(make("span", "badge", "found"));
    if (item.row) small.append(make("bdi", "", item.row));
    if (item.seed) small.append(make("span", "", `seed ${item.seed}`));
    if (item.took && !item.cached) small.append(make("span", "", item.took));
    caption.append(text, small);
    button.append(frame, caption);
    entry.append(button);
    return entry;
  };

  const cards = items.map(card);
  const haystacks = items.map((item) =>
    [item.prompt, item.name, item.row, item.seed, item.error].join("\n").toLowerCase());
  let shown = [];
  let isViewing = false;
  let current = 0; // place in `shown` of the one card that Tab reaches

  const orders = {
    table: (a, b) => a - b,
    name: (a, b) => items[a].name.localeCompare(items[b].name, undefined, { numeric: true }) || a - b,
    prompt: (a, b) => items[a].prompt.localeCompare(items[b].prompt) || a - b,
    seed: (a, b) => { // exact: a seed of twenty digits is no number here
      const x = BigInt(items[a].seed || -1), y = BigInt(items[b].seed || -1);
      return x < y ? -1 : x > y ? 1 : a - b;
    },
    slowest: (a, b) => (items[b].seconds || 0) - (items[a].seconds || 0) || a - b,
  };

  const setCurrent = (place) => {
    const before = shown[current];
    if (before !== undefined) cards[before].firstChild.tabIndex = -1;
    current = Math.max(0, Math.min(place, shown.length - 1));
    const now = shown[current];
    if (now !== undefined) cards[now].firstChild.tabIndex = 0;
  };

  const show = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const status = byId("status").value, cached = byId("cached").value;
    const before = shown[current];
    if (before !== undefined) cards[before].firstChild.tabIndex = -1;
    shown = items.map((_, index) => index).filter((index) =>
      (!status || items[index].status === status) &&
      (!cached || (cached === "found") === items[index].cached) &&
      words.every((word) => haystacks[index].includes(word)));
    shown.sort(orders[byId("order").value]);
    gallery.replaceChildren(...shown.map((index) => cards[index]));
    setCurrent(Math.max(0, shown.indexOf(before)));
    const all = items.length.toLocaleString("en");
    byId("count").textContent = shown.length === items.length ? `${all} shown.`
      : `${shown.length.toLocaleString("en")} of ${all} shown.`;
  };

  const statuses = [...new Set(items.map((item) => item.status))];
  for (const status of statuses) byId("status").append(new Option(status, status));
  byId("tools").hidden = items.length < 2;
  byId("hint").hidden = items.length === 0;
  let waiting = 0;
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 80); });
  for (const id of ["status", "cached", "order"]) byId(id).addEventListener("change", show);

  const perRow = () => {
    const top = cards[shown[0]].offsetTop;
    const place = shown.findIndex((index) => cards[index].offsetTop !== top);
    return place < 0 ? shown.length : place;
  };
  gallery.addEventListener("keydown", (event) => {
    if (!event.target.classList.contains("card") || event.ctrlKey || event.altKey || event.metaKey) return;
    const steps = {
      ArrowLeft: () => current - 1, ArrowRight: () => current + 1,
      ArrowUp: () => (current - perRow() >= 0 ? current - perRow() : current),
      ArrowDown: () => (current + perRow() < shown.length ? current + perRow() : current),
      Home: () => 0, End: () => shown.length - 1,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    setCurrent(steps[event.key]());
    cards[shown[current]].firstChild.focus();
  });
  gallery.addEventListener("focusin", (event) => {
    if (isViewing) return; // a closing dialog gives the focus back to where it was opened
    const place = shown.indexOf(Number(event.target.dataset.index));
    if (place >= 0) setCurrent(place);
  });
  gallery.addEventListener("click", (event) => {
    const button = event.target.closest(".card");
    if (!button) return;
    setCurrent(shown.indexOf(Number(button.dataset.index)));
    view();
    isViewing = true;
    byId("viewer").showModal();
    byId("stand").focus();
  });

  // ---- the viewer ----
  const viewer = byId("viewer"), stand = byId("stand");
  const zoom = (isOn) => {
    const image = stand.querySelector("img");
    isOn = Boolean(isOn && image);
    stand.classList.toggle("zoomed", isOn);
    stand.classList.toggle("fit", !isOn);
    byId("zoom").setAttribute("aria-pressed", String(isOn));
  };
  const note = (text) => { byId("viewer-note").textContent = text; byId("viewer-note").hidden = !text; };
  const lost = (item) => {
    note("The file is not where it was; this is its small copy.");
    const image = make("img");
    image.alt = item.prompt || item.name;
    image.src = item.thumbnail;
    stand.replaceChildren(image);
  };
  const media = (item) => {
    if (item.href && (item.type === "video" || item.type === "audio")) {
      const player = make(item.type);
      player.controls = true;
      player.preload = "metadata";
      player.loop = item.type === "video";
      player.src = item.href;
      return player;
    }
    if (item.href && (item.thumbnail || item.type === "image") && item.status === "done") {
      const image = make("img");
      image.alt = item.prompt || item.name;
      image.addEventListener("error", () => {
        if (item.thumbnail) lost(item);
        else note("The file is not where it was.");
      }, { once: true });
      image.src = item.href;
      return image;
    }
    return make("p", "why", item.error || "There is no file.");
  };
  const view = () => {
    const item = items[shown[current]];
    note(item.status === "done" ? item.error : `${item.status}: ${item.error}`);
    stand.replaceChildren(media(item));
    zoom(false);
    byId("viewer-title").textContent = item.name;
    byId("viewer-place").textContent = `${current + 1} of ${shown.length}`;
    byId("viewer-prompt").textContent = item.prompt;
    byId("viewer-settings").textContent = item.parameters || item.settings || "No settings were kept.";
    byId("copied").textContent = "";
    byId("copy-text").disabled = !item.parameters;
    byId("copy-json").disabled = !item.settings;
    byId("zoom").disabled = !stand.querySelector("img");
    byId("previous").disabled = current === 0;
    byId("next").disabled = current === shown.length - 1;
    const link = byId("viewer-link");
    link.hidden = !item.href;
    if (item.href.startsWith("data:")) link.download = item.name; else link.removeAttribute("download");
    if (item.href) link.href = item.href; else link.removeAttribute("href");
  };
  const move = (step) => {
    if (current + step < 0 || current + step >= shown.length) return;
    setCurrent(current + step);
    view();
  };
  const copy = async (text) => {
    let isDone = true;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = make("textarea");
      area.value = text;
      viewer.append(area);
      area.select();
      isDone = document.execCommand("copy");
      area.remove();
    }
    byId("copied").textContent = isDone ? "Copied." : "The browser does not let this page copy.";
  };
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("close").addEventListener("click", () => viewer.close());
  byId("zoom").addEventListener("click", () => zoom(!stand.classList.contains("zoomed")));
  byId("copy-text").addEventListener("click", () => copy(items[shown[current]].parameters));
  byId("copy-json").addEventListener("click", () => copy(items[shown[current]].settings));
  stand.addEventListener("click", (event) => {
    if (event.target.tagName === "IMG") zoom(!stand.classList.contains("zoomed"));
  });
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
  viewer.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || ["VIDEO", "AUDIO"].includes(event.target.tagName)) return;
    const isZoomed = stand.classList.contains("zoomed"); // then the arrows scroll the picture
    if (event.key === "ArrowLeft" && !isZoomed) move(-1);
    else if (event.key === "ArrowRight" && !isZoomed) move(1);
    else if (event.key === "z" || event.key === "Z") zoom(!isZoomed);
    else return;
    event.preventDefault();
  });
  viewer.addEventListener("close", () => {
    isViewing = false;
    stand.replaceChildren(); // a clip must not play on
    const now = shown[current];
    if (now !== undefined) cards[now].firstChild.focus();
  });
  show();
})();
