"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const button = (text, act) => {
  const made = document.createElement("button");
  [made.type, made.textContent, made.onclick] = ["button", text, act];
  return made;
};
// the theme: light or dark as the system, until a click
const root = document.documentElement;
const isDark = () => (root.style.colorScheme ||
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const theme = button("light / dark", () => { root.style.colorScheme = isDark() ? "light" : "dark"; });
theme.id = "theme";
document.querySelector("header").append(theme);
// "1.2 ms", "244 – 308 ms", "35.5 GiB", "1,894", "-7.5 % *" as numbers; NaN for words
const scale = { n: 1e-9, u: 1e-6, m: 1e-3, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
const longer = { min: 60, h: 3600, d: 86400 };
const value = (text) => {
  const found = /^([-+]?[\d.,]+(?:e[-+]?\d+)?) ?([a-z%/]*)(?: – .*?([a-z%/]*))?[ *<]*$/i.exec(text);
  if (!found) return NaN;
  const unit = found[2] || found[3] || "";
  const times = longer[unit] || (/^[KMGTPk]|^[num]s/.test(unit) ? scale[unit[0]] : 1);
  return parseFloat(found[1].replaceAll(",", "")) * times;
};
const sort = (table, head, column) => {
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  all("th", table).forEach((each) => each.removeAttribute("aria-sort"));
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].textContent]);
  rows.sort(([, a], [, b]) => {
    const [x, y] = [value(a), value(b)];
    return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) || sign * a.localeCompare(b) : sign * (x - y);
  });
  table.tBodies[0].append(...rows.map(([row]) => row));
};
// a spreadsheet runs cells that begin with = + - or @
const cell = ({ textContent: text }) => `"${text.replace(/^([=@]|[+-](?![\d.]))/, "'$&").replaceAll('"', '""')}"`;
const save = (table, name) => {
  const text = [...table.rows].map((row) => [...row.cells].map(cell).join(",") + "\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = name.replace(/[^\w.-]+/g, "-").slice(0, 60) + ".csv";
  link.click();
};
for (const figure of all("figure.table")) {
  const [table, caption] = [figure.querySelector("table"), figure.querySelector("figcaption")];
  if (!table) continue;
  all("th", table).forEach((head, column) => {
    head.role = "button";
    head.tabIndex = 0;
    head.onclick = () => sort(table, head, column);
    head.onkeydown = (event) => event.key === "Enter" && head.onclick();
  });
  const name = caption.textContent;
  caption.append(button("CSV", () => save(table, name)));
}
const mark = () => all(".scroll").forEach((each) =>
  each.classList.toggle("more", each.scrollWidth > each.clientWidth));
addEventListener("resize", mark);
addEventListener("toggle", mark, true);
mark();
