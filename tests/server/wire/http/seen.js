// What a reader of the page can't read: what sticks out of the window, is cut off, or has too little contrast.
(() => {
  const MIN_CONTRAST = 4.5; // of text, by WCAG 2.1
  const tell = (element) => `${element.tagName}#${element.id}.${element.className}: ${element.textContent.slice(0, 40)}`;
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  // Over what lies below, since colours may be transparent.
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (channels) => {
    const [r, g, b] = channels.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const below = (element) => {
    const found = [];
    for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return found;
  };
  const defects = [];
  const isSeen = (element) => element.getClientRects().length && !element.closest(".unseen, .skip, noscript");
  for (const element of document.querySelectorAll("body *")) {
    if (!isSeen(element) || element.closest("svg")) continue;
    const { left, right, width } = element.getBoundingClientRect();
    if (width && (left < -1 || right > innerWidth + 1)) defects.push(`sticks out: ${tell(element)}`);
    if (element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline") defects.push(`overflows: ${tell(element)}`);
  }
  const texts = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    if (node.textContent.trim() && isSeen(node.parentElement)) texts.add(node.parentElement);
  for (const element of texts) {
    const ground = below(element);
    const [low, high] = [over(ground), over([...ground, getComputedStyle(element).color])].map(luminance).sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < MIN_CONTRAST) defects.push(`pale, ${contrast.toFixed(1)}: ${tell(element)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) defects.push("the page scrolls sideways");
  return { defects, texts: texts.size, paper: luminance(over(below(document.body))) };
})()
