// What the tests ask of the page's looks, computed in the page.

export const text = (page, selector) => page.locator(selector).first().innerText();

/** Every visible text with its contrast against what is behind it; those below 4.5. */
export function contrasts(page) {
  return page.evaluate(() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const parsed = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      return [r, g, b, a / 255];
    };
    const over = ([r, g, b, a], [br, bg, bb]) => [r * a + br * (1 - a), g * a + bg * (1 - a), b * a + bb * (1 - a), 1];
    const behind = (node) => {
      const layers = [];
      for (let at = node; at !== null; at = at.parentElement) {
        const layer = parsed(getComputedStyle(at).backgroundColor);
        if (layer[3] > 0) layers.push(layer);
        if (layer[3] === 1) break;
      }
      return layers.reduceRight((ground, layer) => over(layer, ground), [255, 255, 255, 1]);
    };
    const luminance = ([r, g, b]) => {
      const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
      return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const below = [];
    let seen = 0;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement;
      if (walker.currentNode.textContent.trim() === "" || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName)) continue;
      const style = getComputedStyle(node);
      if (!node.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true }) || node.getClientRects().length === 0) continue;
      // What cannot be used may be pale.
      if (node.closest(":disabled") !== null) continue;
      const ground = behind(node);
      const [one, other] = [luminance(over(parsed(style.color), ground)), luminance(ground)].sort((a, b) => b - a);
      const ratio = (one + 0.05) / (other + 0.05);
      seen += 1;
      if (ratio < 4.5) below.push(`${ratio.toFixed(2)} ${node.tagName}.${node.className} “${walker.currentNode.textContent.trim().slice(0, 40)}”`);
    }
    return { seen, below };
  });
}

/** What reaches beyond the width of the window, outside of regions that scroll by themselves. */
export function fits(page) {
  return page.evaluate(() => {
    const width = document.documentElement.clientWidth;
    const wide = document.documentElement.scrollWidth > width ? [`the page is ${document.documentElement.scrollWidth} wide`] : [];
    const beyond = [...document.querySelectorAll("body *")].filter((node) =>
      node.closest(".scroll, .skip, svg") === null && node.getBoundingClientRect().right > width + 0.5);
    return [...wide, ...beyond.map((node) => `${node.tagName}#${node.id}.${node.className}`)];
  });
}
