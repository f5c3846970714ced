"""A GPT in the browser: its decoder in C as WebAssembly, the model in plain JavaScript, and one page that holds both.

page ─► shell.html, start.js ─► page.html, page.css, page.js ─► worker.js ─┬─► standalone: a .birdie file to tensors
  ├── units       bytes as characters                                      ├─► model.js: tensors and tokens to logits
  ├── plan        the shape of a model                                     └─► tokenizer.js: text to tokens and back
  ├── pieces      a tokenizer in plain JSON
  └── support     which files a page decodes

package.json tells Node before 20.19 that these are ES modules.
"""
