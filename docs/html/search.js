// The search box: names that begin with what is written, that have it inside, and then texts that mention it.
(function () {
  const box = document.getElementById("search"), list = document.getElementById("found");
  const pages = document.getElementById("pages");
  let chosen = -1;

  function rank(entry, words) {
    let sum = 0;
    const name = entry[0].toLowerCase(), last = name.replace(/^.*[.:]/, "");
    for (const word of words) {
      if (last === word || name === word) sum += 0;
      else if (last.startsWith(word)) sum += 1 + last.length / 100;
      else if (name.includes(word)) sum += 2 + name.length / 100;
      else if (word.length > 2 && entry[2].toLowerCase().includes(word)) sum += 5;
      else return Infinity;
    }
    return sum;
  }

  function show() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.textContent = "";
    chosen = -1;
    pages.hidden = words.length > 0;
    if (!words.length) return;
    const found = index.map(e => [rank(e, words), e]).filter(p => p[0] < Infinity).sort((a, b) => a[0] - b[0]);
    for (const [, entry] of found.slice(0, 40)) {
      const item = document.createElement("li"), link = document.createElement("a"), text = document.createElement("span");
      link.href = entry[1];
      link.textContent = entry[0];
      text.textContent = entry[2];
      link.append(text);
      item.append(link);
      list.append(item);
    }
    if (!found.length) list.textContent = "nothing found";
  }

  function move(step) {
    const items = list.querySelectorAll("li");
    if (!items.length) return;
    if (items[chosen]) items[chosen].className = "";
    chosen = (chosen + step + items.length) % items.length;
    items[chosen].className = "here";
    items[chosen].scrollIntoView({ block: "nearest" });
  }

  box.addEventListener("input", show);
  box.addEventListener("keydown", function (event) {
    if (event.key === "ArrowDown") { move(1); event.preventDefault(); }
    else if (event.key === "ArrowUp") { move(-1); event.preventDefault(); }
    else if (event.key === "Escape") { box.value = ""; show(); }
    else if (event.key === "Enter") {
      const link = list.querySelectorAll("li a")[Math.max(chosen, 0)];
      if (link) location.href = link.href;
    }
  });
  document.addEventListener("keydown", function (event) {
    if (event.key === "/" && document.activeElement !== box) { box.focus(); event.preventDefault(); }
  });
  const here = document.querySelector("nav li.here");
  if (here) here.scrollIntoView({ block: "nearest" });
  if (box.value) show();
})();
