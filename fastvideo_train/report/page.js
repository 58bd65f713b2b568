"use strict";

// Curves: the nearest step under the pointer, and every curve's value there.
for (const figure of document.querySelectorAll(".chart")) {
  const series = JSON.parse(figure.dataset.series);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const hide = () => { cursor.style.visibility = tip.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const near = series.map((s) => s.points.reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a));
    const [step, , at] = near.reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    tip.replaceChildren(`step ${step}`);
    near.forEach((point, i) => {
      if (point[0] !== step) return;
      const line = document.createElement("div"), dot = document.createElement("i");
      dot.style.background = series[i].colour;
      line.append(dot, series.length > 1 ? `${series[i].name} ${point[1]}` : point[1]);
      tip.append(line);
    });
    const left = at / svg.viewBox.baseVal.width * box.width;
    tip.style.left = tip.style.right = "";
    if (left < box.width / 2) tip.style.left = `${left + 10}px`; else tip.style.right = `${box.width - left + 10}px`;
    cursor.style.visibility = tip.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", hide);
}

// Clips: which to show, and whether they play.
const videos = [...document.querySelectorAll("video")];
const pause = document.querySelector(".pause");
const play = (on) => {
  videos.forEach((video) => on ? video.play().catch(() => {}) : video.pause());
  if (pause) pause.textContent = on ? "pause" : "play";
};
if (pause) pause.addEventListener("click", () => play(pause.textContent === "play"));
if (matchMedia("(prefers-reduced-motion: reduce)").matches) play(false);

const choices = [...document.querySelectorAll("[data-show]")];
for (const button of choices) {
  button.addEventListener("click", () => {
    choices.forEach((other) => other.classList.toggle("on", other === button));
    for (const pair of document.querySelectorAll(".pair")) {
      pair.hidden = button.dataset.show !== "" && pair.dataset.change !== button.dataset.show;
    }
  });
}

// Commands: copy. Where the page may not use the clipboard, the text is selected instead.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1200);
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
}
