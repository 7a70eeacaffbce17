// A browser starts no worker from a file, so the search would be dead where the site is read from a disk. There, this
// lets the worker's script run in a hidden frame instead. Named so that mkdocs-material does not fetch its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {};
      const script = inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((done) => (script.onload = done));
      inside.document.head.append(script);
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
