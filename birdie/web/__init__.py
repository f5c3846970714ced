"""Models in the browser: a decoder of .birdie files and a GPT in plain JavaScript, and one page that holds all of it.

page ─► page.html, page.css, page.js ─► worker.js ─┬─► decoder.js    bytes of a .birdie file to tensors
  ├── units       bytes as characters               ├─► model.js     tensors and tokens to logits
  ├── plan        the shape of a model              └─► tokenizer.js text to tokens and back
  └── pieces      a tokenizer in plain JSON

javascript joins modules into one, without comments and with short names; support says which files decoder.js decodes.
package.json tells Node before 20.19 that these are ES modules.
"""
