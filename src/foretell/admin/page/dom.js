// Elements and figures. Data from the API becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const element = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const shape = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Sets a text, without touching the page if it is the same. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function name(node, attribute, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(attribute);
  else if (node.getAttribute(attribute) !== String(value)) node.setAttribute(attribute, value);
}

/** Makes the children of `parent` those of `items`, by key: existing children are kept, and with them
 * the focus. */
export function list(parent, items, key, make, fill) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const wanted = String(key(item));
    let child = old.get(wanted);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = wanted;
    }
    old.delete(wanted);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    fill(child, item);
  }
  for (const child of old.values()) child.remove();
}

/** Rows of a table: each cell is a text, or `{ text, title, class }`, or `{ node, same, fill }`: the
 * element made by `node` stays while `same` does, and with it the focus; `fill` updates it. */
export function rows(body, items, key, cells, empty) {
  const columns = body.parentElement.tHead.rows[0].cells;
  const shown = items.length > 0 ? items : [null];
  const make = () => element("tr", {});
  list(body, shown, (item) => (item === null ? "nothing" : key(item)), make, (row, item) => {
    if (item === null) {
      if (row.cells.length === 0) row.append(element("td", { colspan: columns.length, class: "empty" }));
      say(row.cells[0], empty);
      return;
    }
    cells(item).forEach((cell, place) => {
      const told = typeof cell === "object" && cell !== null ? cell : { text: cell };
      if (row.cells.length <= place) {
        row.append(place === 0 ? element("th", { scope: "row" }) : element("td", {}));
      }
      put(row.cells[place], told, columns[place].className);
    });
  });
}

function put(cell, told, column) {
  name(cell, "title", told.title);
  name(cell, "class", [column, told.class].filter(Boolean).join(" ") || null);
  if (told.node === undefined) {
    say(cell, told.text ?? "–");
  } else if (cell.dataset.same !== told.same) {
    cell.dataset.same = told.same;
    cell.replaceChildren(told.node());
  }
  told.fill?.(cell.firstChild);
}

// ------------------------------------------------------------------------------------------------ figures

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => WHOLE.format(value);

/** Three significant digits, without an exponent. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);
}

export const share = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(part < all ? 1 : 0)} %` : "–");
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);

export function millis(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms === 0) return "0 ms";
  return ms >= 10_000 ? `${figure(ms / 1000)} s` : ms > 0 && ms < 0.1 ? `${whole(ms * 1000)} µs` : `${figure(ms)} ms`;
}

export function duration(seconds) {
  const rest = Math.max(0, Math.round(seconds));
  if (rest < 60) return `${rest} s`;
  if (rest < 3600) return `${Math.floor(rest / 60)} min ${rest % 60} s`;
  if (rest < 86_400) return `${Math.floor(rest / 3600)} h ${Math.floor((rest % 3600) / 60)} min`;
  return `${Math.floor(rest / 86_400)} d ${Math.floor((rest % 86_400) / 3600)} h`;
}

/** A duration in seconds as the time since a moment, in words that do not change every second. */
export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds / 5) * 5} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return `${duration(seconds)} ago`;
}

export function absolute(unix) {
  const at = new Date(unix * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const offset = -at.getTimezoneOffset();
  const zone = `${offset < 0 ? "−" : "+"}${two(Math.floor(Math.abs(offset) / 60))}:${two(Math.abs(offset) % 60)}`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())} ${zone}`;
}

export const clock = (unix) => absolute(unix).slice(11, 19);
