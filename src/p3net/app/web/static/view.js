// An image on a canvas, moved and zoomed, drawn at most once a frame.
// Large images are kept in halves of halves, so a frame reads about as many pixels as it shows.

const SMALLEST = 512;

export class View {
  // `paint(context, view)` draws over the image, in CSS pixels of the canvas.
  constructor(canvas, paint) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.paint = paint;
    this.levels = [];
    this.scale = 1;
    this.left = 0; // of the image's corner, in CSS pixels
    this.top = 0;
    this.fitted = true;
    this.pending = false;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  // `width` and `height` are the image's own; the blob may hold it smaller.
  async show(blob, width, height) {
    const levels = [await createImageBitmap(blob)];
    for (let last = levels[0]; last.width > SMALLEST && last.height > SMALLEST; last = levels.at(-1)) {
      const size = { resizeWidth: last.width >> 1, resizeHeight: last.height >> 1, resizeQuality: "medium" };
      levels.push(await createImageBitmap(last, size));
    }
    this.clear();
    this.levels = levels;
    this.width = width;
    this.height = height;
    this.fit();
  }

  clear() {
    for (const level of this.levels) level.close();
    this.levels = [];
    this.redraw();
  }

  get size() {
    return [this.canvas.clientWidth, this.canvas.clientHeight];
  }

  fit() {
    const [width, height] = this.size;
    if (!this.levels.length || !width || !height) return;
    this.scale = Math.min(width / this.width, height / this.height) * 0.98;
    this.left = (width - this.scale * this.width) / 2;
    this.top = (height - this.scale * this.height) / 2;
    this.fitted = true;
    this.redraw();
  }

  zoom(factor, x = this.size[0] / 2, y = this.size[1] / 2) {
    const least = Math.min(1, Math.min(this.size[0] / this.width, this.size[1] / this.height)) * 0.5;
    const scale = Math.min(40, Math.max(least, this.scale * factor));
    this.left = x - ((x - this.left) * scale) / this.scale;
    this.top = y - ((y - this.top) * scale) / this.scale;
    this.scale = scale;
    this.#moved();
  }

  pan(dx, dy) {
    this.left += dx;
    this.top += dy;
    this.#moved();
  }

  #moved() {
    const [width, height] = this.size; // some of the image stays in sight
    const margin = 40;
    this.left = Math.min(width - margin, Math.max(margin - this.scale * this.width, this.left));
    this.top = Math.min(height - margin, Math.max(margin - this.scale * this.height, this.top));
    this.fitted = false;
    this.redraw();
  }

  toImage(x, y) {
    return [(x - this.left) / this.scale, (y - this.top) / this.scale];
  }

  toScreen(x, y) {
    return [x * this.scale + this.left, y * this.scale + this.top];
  }

  isInside(x, y) {
    return x >= 0 && y >= 0 && x < this.width && y < this.height;
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, context } = this;
    const ratio = canvas.width / (canvas.clientWidth || 1);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = getComputedStyle(canvas).getPropertyValue("--stage") || "#222";
    context.fillRect(0, 0, canvas.width, canvas.height);
    if (!this.levels.length) return;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#drawImage(context, ratio);
    this.paint(context, this);
  }

  #drawImage(context, ratio) {
    const [width, height] = this.size;
    const [x0, y0] = this.toImage(0, 0).map((value) => Math.max(0, value));
    const [right, bottom] = this.toImage(width, height);
    const x1 = Math.min(this.width, right);
    const y1 = Math.min(this.height, bottom);
    if (x1 <= x0 || y1 <= y0) return;
    const finest = this.levels[0].width / this.width; // pixels held for one of the image
    let level = this.levels[0];
    for (const each of this.levels) {
      if ((each.width / this.width) >= this.scale * ratio * 0.9) level = each;
    }
    const across = level.width / this.width;
    const down = level.height / this.height;
    context.imageSmoothingEnabled = this.scale * ratio < 3 * finest;
    context.drawImage(
      level, x0 * across, y0 * down, (x1 - x0) * across, (y1 - y0) * down,
      this.left + x0 * this.scale, this.top + y0 * this.scale, (x1 - x0) * this.scale, (y1 - y0) * this.scale,
    );
  }

  #resize() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = this.size;
    if (!width || !height) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    if (this.fitted) this.fit();
    this.draw(); // a resized canvas is empty until drawn
  }

  #wheel(event) {
    if (!this.levels.length) return;
    event.preventDefault();
    const amount = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
    this.zoom(Math.exp(-amount * (event.ctrlKey ? 0.01 : 0.0015)), event.offsetX, event.offsetY);
  }
}
