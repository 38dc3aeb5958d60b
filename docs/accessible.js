// Names and focus that the theme leaves out, for readers with a screen reader or with a keyboard alone.

"use strict";

new MutationObserver(() => {
  for (const group of document.querySelectorAll(".md-code__nav:not([aria-label])")) {
    const number = [...document.querySelectorAll("pre")].indexOf(group.closest("pre")) + 1;
    group.setAttribute("aria-label", `Block of code ${number}`);
  }
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.setAttribute("tabindex", "0");
}).observe(document.documentElement, { childList: true, subtree: true });
